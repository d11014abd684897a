"""Loggers of metrics besides `metrics.jsonl`: TensorBoard, wandb and trackio."""

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from tokenformer.train.metrics import Row

Report = Callable[[Row], None]
TRACKERS = ("wandb", "trackio")
"""Both have the functions init, log and finish."""


@contextmanager
def tensorboard(folder: Path, config: dict[str, Any], first_step: int) -> Iterator[Report]:
    from torch.utils.tensorboard.writer import SummaryWriter

    # Hide what a killed run logged after the checkpoint that this one resumes from.
    with SummaryWriter(str(folder / "tensorboard"), purge_step=first_step) as writer:

        def report(row: Row) -> None:
            for name, value in numbers(row).items():
                writer.add_scalar(name, value, row["step"])

        yield report


@contextmanager
def tracker(name: str, folder: Path, config: dict[str, Any]) -> Iterator[Report]:
    library = importlib.import_module(name)
    library.init(project="tokenformer", name=folder.name, config=config)
    try:
        yield lambda row: library.log(numbers(row), step=row["step"])
    finally:
        library.finish()


def reporter(
    name: str, folder: Path, config: dict[str, Any], first_step: int
) -> AbstractContextManager[Report]:
    return (
        tensorboard(folder, config, first_step)
        if name == "tensorboard"
        else tracker(name, folder, config)
    )


def check_reporters(names: Iterable[str]) -> None:
    """Raise for a logger that is unknown or not installed."""
    for name in names:
        if name not in ("tensorboard", *TRACKERS):
            choices = ", ".join(("tensorboard", *TRACKERS))
            raise ValueError(f"run.log_to: {name!r} is unknown; choose from {choices}")
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"run.log_to: {name} is not installed; pip install {name}")


def numbers(row: Row) -> dict[str, float]:
    return {name: value for name, value in row.items() if isinstance(value, int | float)}
