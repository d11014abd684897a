"""metrics.jsonl: a row of metrics per training step."""

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenformer.errors import TrainingError
from tokenformer.files import write_atomic

if TYPE_CHECKING:  # commands read metrics before they import torch
    from tokenformer.train.parallel.ranks import Ranks

Row = dict[str, Any]
"""step, tokens (images for an image task), flops, seconds, loss, lr, gradient_norm; dead_groups and
peak_load of routed tokens; val_loss and the task's metrics after a validation; `problem` if the
step was not taken."""


@contextmanager
def metrics_writer(path: Path, ranks: "Ranks") -> Iterator[Callable[[Row], None]]:
    """Yield a function that appends a row to the file; it does nothing on ranks other than 0."""
    if not ranks.first:
        yield lambda row: None
        return
    with path.open("ab", buffering=0) as file:

        def write(row: Row) -> None:
            with disk_errors(path):
                line = json.dumps(row).encode() + b"\n"
                while line:  # an unbuffered write may be partial
                    line = line[file.write(line) :]

        yield write


def read_metrics(path: Path, report: Callable[[str], None] = warnings.warn) -> list[Row]:
    """Return the valid rows. Damaged lines, as a kill may leave, are skipped and reported once."""
    if not path.exists():
        return []
    rows: list[Row] = []
    damaged: list[int] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        row = parse(line)
        if row is not None:
            rows.append(row)
        elif line:
            damaged.append(number)
    if damaged:
        lines = "line" if len(damaged) == 1 else f"{len(damaged)} lines, the first"
        report(f"{path}: skipping {lines} {damaged[0]}: not a row of metrics")
    return rows


def parse(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_row = isinstance(row, dict) and type(row.get("step")) is int
    return row if is_row else None


def cut_metrics(path: Path, step: int, report: Callable[[str], None] = warnings.warn) -> None:
    """Remove damaged lines and the rows after `step`, which will be repeated."""
    kept = [row for row in read_metrics(path, report) if row["step"] <= step]
    with disk_errors(path):
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in kept))


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError, as of a full disk, into a TrainingError."""
    try:
        yield
    except OSError as error:
        raise TrainingError(f"{path} cannot be written: {error.strerror or error}") from None
