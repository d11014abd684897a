"""The report of a campaign: a table by part and phase as Markdown and JSON, and the failures."""

import json
import platform
from collections import Counter, defaultdict
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.campaign.trials import Result


def tabulate(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return a row for each part and phase: trials, outcomes and failures. Each kill of a run has
    the outcome of that run."""
    outcomes: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    failed: Counter[tuple[str, str]] = Counter()
    for result in results:
        for phase in result.phases or ["none"]:
            outcomes[result.part, phase][result.outcome] += 1
            failed[result.part, phase] += not result.ok
    return [
        {
            "part": part,
            "phase": phase,
            "count": found.total(),
            "failed": failed[part, phase],
            "outcomes": dict(found.most_common()),
        }
        for (part, phase), found in sorted(outcomes.items())
        if phase != "none" or failed[part, phase]
    ]


def totals(results: Sequence[Result]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for result in results:
        row = found.setdefault(result.part, {"trials": 0, "faults": 0, "failed": 0})
        row["trials"] += 1
        row["faults"] += len(result.phases)
        row["failed"] += not result.ok
    return found


def markdown(results: Sequence[Result]) -> str:
    lines = [
        "| part | phase or kind | count | outcomes | failed |",
        "|---|---|--:|---|--:|",
    ]
    for row in tabulate(results):
        words = ", ".join(f"{count} {word}" for word, count in row["outcomes"].items())
        cells = (row["part"], row["phase"], row["count"], words, row["failed"])
        lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    for part, row in totals(results).items():
        cells = (part, f"**all**, {row['trials']} trials", row["faults"], "", row["failed"])
        lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    return "\n".join(lines) + "\n"


def failures(results: Sequence[Result]) -> list[str]:
    return [
        f"{r.part} {r.index}: {r.outcome} [{', '.join(r.phases)}] {r.detail[-800:]}\n"
        f"  again: python -m tests.campaign --seed {r.seed} --only {r.part}:{r.index}"
        for r in results
        if not r.ok
    ]


def write(out: Path, results: Sequence[Result], seed: int) -> None:
    """Write `out`/summary.md and summary.json."""
    versions = {"python": platform.python_version(), "torch": version("torch")}
    document = {
        "seed": seed,
        "seconds": round(sum(result.seconds for result in results), 1),
        "versions": versions,
        "totals": totals(results),
        "table": tabulate(results),
        "failures": failures(results),
    }
    (out / "summary.json").write_text(json.dumps(document, indent=2) + "\n")
    (out / "summary.md").write_text(markdown(results))
