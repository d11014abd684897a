"""The report page: claim, command, cost, figures, plots and verdict of every finished exhibit.

All text beside the descriptions in the exhibits is computed from the recorded results. The
published page is docs/results/paper.md, its results are experiments/results.jsonl. A study with a
`page` has one of its own in docs/results.
"""

import json
from pathlib import Path

from experiments.catalog import STUDIES
from experiments.exhibit import Exhibit, Findings, Scale, compute_of
from experiments.job import Results, with_needs
from experiments.step_times import cost_table, step_times
from experiments.workspace import ROOT
from tokenformer.files import write_atomic

PUBLISHED = ROOT / "experiments" / "results.jsonl"
PAGE, IMAGES = ROOT / "docs" / "results" / "paper.md", ROOT / "docs" / "images" / "paper"
MACHINE = """The published runs were computed in November 2026, one core each, on a shared machine
with two cores (AMD EPYC, AVX2, fp32). Core-minutes include what other work on it cost them."""


def publish(results: Results) -> Results:
    """Add results to the published ones and return them; a job computed again replaces its row."""
    published = Results(PUBLISHED)
    published.rows |= results.rows
    text = "".join(json.dumps(row) + "\n" for row in published.rows.values())
    write_atomic(PUBLISHED, text)
    return published


def write_report(
    exhibits: dict[str, Exhibit], scale: Scale, results: Results, folder: Path | None
) -> Path:
    """Write the page and its plots to `folder`, or publish them in docs. Return the page. In docs,
    studies are not on this page: each has its own, written here if the exhibit names it."""
    page = PAGE if folder is None else folder / "report.md"
    images = IMAGES if folder is None else folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    findings = {name: exhibit.report(scale, results) for name, exhibit in exhibits.items()}
    for name, found in findings.items():
        study = folder is None and name in STUDIES
        for plot in found.plots:
            plot.draw((images.parent if study else images) / plot.name)
    if folder is None:
        for name, exhibit in exhibits.items():
            if exhibit.page:
                text = study_text(name, exhibit, findings[name], scale, results)
                write_atomic(PAGE.with_name(exhibit.page), text)
        exhibits = {name: e for name, e in exhibits.items() if name not in STUDIES}
    if not exhibits:
        return page
    link = "../images/paper" if folder is None else "images"
    machine = MACHINE if folder is None else ""
    write_atomic(page, page_text(exhibits, findings, scale, results, link, machine))
    return page


def page_text(
    exhibits: dict[str, Exhibit],
    findings: dict[str, Findings],
    scale: Scale,
    results: Results,
    images: str,
    machine: str,
) -> str:
    parts = [introduction(scale), *([machine] if machine else [])]
    parts.append(overview(exhibits, findings))
    parts += [section(n, e, findings[n], scale, results, images) for n, e in exhibits.items()]
    return "\n\n".join(parts) + "\n"


def study_text(name: str, exhibit: Exhibit, found: Findings, scale: Scale, results: Results) -> str:
    """Return the results page of a study."""
    return (
        "\n\n".join(
            [
                f"# {exhibit.title}: results",
                f"{found.argument}",
                f"**Setting.** {exhibit.setting} Where a table does not say otherwise, ± is the "
                "largest deviation from the mean over the seeds.",
                MACHINE,
                command(name, exhibit, scale, results),
                *figures(found, "../images"),
                *costs(exhibit, scale, results),
            ]
        )
        + "\n"
    )


def introduction(scale: Scale) -> str:
    return f"""# The paper's tables and figures: results

Every table and figure of the paper as a command, run at the scale `{scale.name}`. `make reproduce`
runs all of them, resumes after an interruption, and writes this page from the recorded runs. Losses
are held-out bits per byte; where a table does not say otherwise, ± is the largest deviation from
the mean over the seeds. Compared models train on the same number of tokens. Each has a sweep of
learning rates of its own, at one seed; text models are swept on the held-out text that is reported.
A setting says which rows have no sweep. The verdict "not at this scale" means that models this
small show a part of the claim, or cannot tell."""


def overview(exhibits: dict[str, Exhibit], findings: dict[str, Findings]) -> str:
    lines = ["| exhibit | in the paper | verdict | headline |", "|---|---|---|---|"]
    for name, exhibit in exhibits.items():
        found = findings[name]
        title = f"[{exhibit.title}](#{anchor(exhibit.title)})"
        lines.append(f"| {title} | {exhibit.source} | **{found.verdict}** | {found.headline} |")
    return "\n".join(lines)


def anchor(title: str) -> str:
    kept = "".join(c for c in title.lower() if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")


def section(
    name: str, exhibit: Exhibit, found: Findings, scale: Scale, results: Results, images: str
) -> str:
    return "\n\n".join(
        [
            f"## {exhibit.title}",
            f"**Claim** ({exhibit.source}). {exhibit.claim}",
            f"**Verdict: {found.verdict}.** {found.argument}",
            f"**Setting.** {exhibit.setting}",
            command(name, exhibit, scale, results),
            *figures(found, images),
            *costs(exhibit, scale, results),
        ]
    )


def costs(exhibit: Exhibit, scale: Scale, results: Results) -> list[str]:
    """Return the table of what the arms cost, if the exhibit names them."""
    if exhibit.arms is None:
        return []
    arms = exhibit.arms(scale, results)
    return [cost_table(arms, step_times(arms, scale), results).markdown()]


def command(name: str, exhibit: Exhibit, scale: Scale, results: Results) -> str:
    jobs = with_needs(exhibit.jobs(scale, results))
    return f"**Command.** `python -m experiments run {name}`: {cost(jobs, results)}."


def figures(found: Findings, images: str) -> list[str]:
    """Return the tables, plots and notes."""
    parts = [table.markdown() for table in found.tables]
    parts += [f"![{plot.caption}]({images}/{plot.name})" for plot in found.plots]
    return [*parts, *found.notes]


def cost(jobs: list, results: Results) -> str:
    seconds = sum(results[job].get("seconds", 0.0) for job in jobs if job in results)
    count = f"{len(jobs)} job{'s' if len(jobs) != 1 else ''}"
    flops = compute_of(jobs)
    if not flops:
        return f"{count}, {seconds:.0f} core-seconds"
    return f"{count}, {flops:.1e} FLOPs, {seconds / 60:.0f} core-minutes"
