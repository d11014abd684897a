"""The rows of `metrics.jsonl`: what a run reports of each step."""

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
"""step, tokens (of an image task: images), flops, seconds, loss, lr, gradient_norm; val_loss, and
what the task says of it, where validated; `problem` where the step went wrong."""


@contextmanager
def metrics_writer(path: Path, ranks: "Ranks") -> Iterator[Callable[[Row], None]]:
    """A function that appends a row to the file; on other ranks than 0 it does nothing."""
    if not ranks.first:
        yield lambda row: None
        return
    with path.open("ab", buffering=0) as file:

        def write(row: Row) -> None:
            with disk_errors(path):
                line = json.dumps(row).encode() + b"\n"
                while line:  # an unbuffered write may take less than it is given
                    line = line[file.write(line) :]

        yield write


def read_metrics(path: Path, report: Callable[[str], None] = warnings.warn) -> list[Row]:
    """The rows that are valid. Lines that a kill or something else has damaged are left out, and
    reported together."""
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
    """Remove the rows of the steps that will be repeated, and damaged lines."""
    kept = [row for row in read_metrics(path, report) if row["step"] <= step]
    with disk_errors(path):
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in kept))


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """A full or failing disk as one line."""
    try:
        yield
    except OSError as error:
        raise TrainingError(f"{path} cannot be written: {error.strerror or error}") from None
