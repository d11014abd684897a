"""The progress display of a run: a bar with loss, speed and time left, or lines in a log."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import mean

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from tokenformer.train.memory import used_bytes
from tokenformer.train.metrics import Row

GAP = "  "
SHORTEST_BAR = 6
LONGEST_TIME = len("12:34:56")


@contextmanager
def progress(
    console: Console,
    steps: int,
    peak: float | None = None,
    unit: str = "tokens",
    *,
    done: int = 0,
    details: bool = False,
) -> Iterator[Callable[[Row], None]]:
    """Yield a function that shows a row: in a live bar on a terminal, else in at most ten lines.

    Args:
        steps: Steps of the whole run.
        peak: FLOP/s of which to show the share that is reached, if `details`.
        unit: tokens or images.
        done: Steps that were trained before.
        details: Show learning rate and memory too.
    """
    describe = Describer(peak=peak, unit=unit, details=details)
    if not console.is_terminal:
        shown = {-(-steps * tenth // 10) for tenth in range(1, 11)}

        def show_line(row: Row) -> None:
            text = GAP.join(describe(row))
            if row["step"] in shown:
                line = f"step {row['step']:.0f}/{steps}{GAP}{text}"
                console.print(line, highlight=False, soft_wrap=True)

        yield show_line
        return

    columns = (
        BarColumn(bar_width=None),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=steps, completed=done)

        def show_bar(row: Row) -> None:
            width = console.width - SHORTEST_BAR - len(f"{steps}/{steps}") - LONGEST_TIME - 3
            bar.update(task, completed=row["step"], description=fit(describe(row), width))

        yield show_bar


def fit(parts: list[str], width: int) -> str:
    """Join the parts that fit into `width` columns, in order of priority."""
    text = ""
    for part in parts:
        longer = f"{text}{GAP}{part}" if text else part
        if len(longer) <= width:
            text = longer
    return text


class Describer:
    """Formats a row, most important numbers first. Loss and speed are means of the last rows;
    losses are in nats."""

    def __init__(
        self,
        window: int = 50,
        peak: float | None = None,
        unit: str = "tokens",
        details: bool = False,
    ) -> None:
        self.rows: deque[Row] = deque(maxlen=window)
        self.peak, self.unit, self.details = peak, unit, details
        self.held_out: Row = {}

    def __call__(self, row: Row) -> list[str]:
        self.rows.append(row)
        first = self.rows[0]
        speed = row["tokens"] / row["seconds"]
        if row["tokens"] > first["tokens"]:
            speed = (row["tokens"] - first["tokens"]) / (row["seconds"] - first["seconds"])
        if "val_loss" in row:
            self.held_out = row
        parts = [f"loss {mean(past['loss'] for past in self.rows):.3f}"]
        if self.held_out:
            parts.append(f"held-out loss {self.held_out['val_loss']:.3f}")
        parts.append(f"{speed:,.0f} {self.unit}/s")
        if "val_bpb" in self.held_out:
            parts.append(f"{self.held_out['val_bpb']:.3f} bits/byte")
        if "keep_loss" in self.held_out:
            parts.append(f"kept data {self.held_out['keep_loss']:.3f}")
        if "val_accuracy" in self.held_out:
            parts.append(f"{self.held_out['val_accuracy']:.1%} right")
        if self.details:
            parts += [f"lr {row['lr']:.1e}", *self.share_of_peak(row, speed)]
            parts.append(f"{used_bytes() / 1e9:.1f} GB")
        return parts

    def share_of_peak(self, row: Row, speed: float) -> list[str]:
        """Return nothing if the peak is unknown or was underestimated on a busy machine."""
        if self.peak is None:
            return []
        share = speed * row["flops"] / row["tokens"] / self.peak
        return [f"{share:.0%} of matmul peak"] if share <= 1 else []
