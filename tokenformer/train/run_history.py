"""The training history of a run for its model card: data, steps, held-out results, growth."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from tokenformer.growth.model_folder import history_line
from tokenformer.models.model_card import public_name, read_history

TAIL = 1 << 20
"""Bytes at the end of metrics.jsonl in which to look for the last validation."""
RESULTS = {
    "val_loss": "held-out loss {:.4f}",
    "val_bpb": "{:.4f} bits per byte",
    "val_accuracy": "held-out accuracy {:.4f}",
}


def run_history(run: Path) -> list[str]:
    """Return lines about the training in a run folder; none without a readable config.yaml."""
    try:
        recipe = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
        model, data, options = recipe["model"], recipe["data"], recipe["run"]
        lines = []
        if start := model["start_from"]:
            lines += read_history(Path(start)) or [f"Started from {public_name(start)}"]
        reports = sorted(run.glob("growth*.json"), key=lambda file: (len(file.name), file.name))
        lines += [history_line(json.loads(file.read_text())) for file in reports]
        on = public_name(data["corpus"] or data["images"] or data.get("image_text"))
        length = f" of length {data['length']}" if data["corpus"] else ""
        batches = f"batches of {options['batch_size']}{length}, seed {options['seed']}"
        return [*lines, f"Trained on {on}: {batches}{results(run)}"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        return []


def results(run: Path) -> str:
    """Return the steps and the last held-out results, from the end of metrics.jsonl."""
    rows: list[dict[str, Any]] = []
    with suppress(OSError), (run / "metrics.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - TAIL))
        for line in file:
            with suppress(ValueError):
                rows.append(json.loads(line))
    rows = [row for row in rows if isinstance(row, dict) and "step" in row and "problem" not in row]
    if not rows:
        return ""
    text = f"; {rows[-1]['step']:,} steps"
    if (last := next((row for row in reversed(rows) if "val_loss" in row), None)) is not None:
        found = [form.format(last[name]) for name, form in RESULTS.items() if name in last]
        text += f"; {', '.join(found)} at step {last['step']:,}"
    return text
