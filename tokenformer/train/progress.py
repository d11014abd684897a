"""The live display of a run: a bar with loss, speed and time left, or plain lines in a log."""

import resource
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import mean

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from tokenformer.train.metrics import Row


@contextmanager
def progress(
    console: Console, steps: int, peak: float | None = None, unit: str = "tokens"
) -> Iterator[Callable[[Row], None]]:
    """A display for a run of `steps` steps: live on a terminal, ten lines at most elsewhere. With
    `peak`, FLOPs per second, it tells which share of it is reached. `unit` is what is counted."""
    describe = Describer(peak=peak, unit=unit)
    if not console.is_terminal:
        shown = {-(-steps * tenth // 10) for tenth in range(1, 11)}

        def show_line(row: Row) -> None:
            text = describe(row)
            if row["step"] in shown:
                console.print(f"step {row['step']:.0f}/{steps}  {text}", highlight=False)

        yield show_line
        return

    columns = (
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=steps)

        def show_bar(row: Row) -> None:
            bar.update(task, completed=row["step"], description=describe(row))

        yield show_bar


class Describer:
    """One line on where a run stands: means of the last rows, so that it can be read."""

    def __init__(self, window: int = 50, peak: float | None = None, unit: str = "tokens") -> None:
        self.rows: deque[Row] = deque(maxlen=window)
        self.peak, self.unit = peak, unit
        self.held_out = ""

    def __call__(self, row: Row) -> str:
        self.rows.append(row)
        first = self.rows[0]
        speed = row["tokens"] / row["seconds"]
        if row["tokens"] > first["tokens"]:
            speed = (row["tokens"] - first["tokens"]) / (row["seconds"] - first["seconds"])
        if "val_bpb" in row:
            self.held_out = f"  held out {row['val_bpb']:.3f} bits/byte"
        if "val_accuracy" in row:
            self.held_out = f"  held out {row['val_accuracy']:.1%} right"
        loss = mean(past["loss"] for past in self.rows)
        text = f"loss {loss:.3f}{self.held_out}  {speed:,.0f} {self.unit}/s"
        if self.peak is not None:
            share = speed * row["flops"] / row["tokens"] / self.peak
            text += f"  {share:.0%} of matmul peak  lr {row['lr']:.1e}  {memory() / 1e9:.1f} GB"
        return text


def memory() -> int:
    """Bytes: the most an accelerator has held, or this process, where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
