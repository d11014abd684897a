"""The live display of a run: a bar with loss, speed and time left, or plain lines in a log."""

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
    """A display for a run of `steps` steps: live on a terminal, ten lines at most elsewhere.

    `done`: steps made before. `details`: learning rate and memory too, and with `peak`, FLOPs per
    second, the share of it that is reached. `unit` is what is counted.
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
            room = console.width - SHORTEST_BAR - len(f"{steps}/{steps}") - LONGEST_TIME - 3
            bar.update(task, completed=row["step"], description=fitted(describe(row), room))

        yield show_bar


def fitted(parts: list[str], room: int) -> str:
    """The parts that fit into so many columns, the first before the later ones."""
    text = ""
    for part in parts:
        longer = f"{text}{GAP}{part}" if text else part
        if len(longer) <= room:
            text = longer
    return text


class Describer:
    """Where a run stands, the most important first: means of the last rows, so that they can be
    read. Training and held-out loss are in the same unit, nats."""

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
        if "val_accuracy" in self.held_out:
            parts.append(f"{self.held_out['val_accuracy']:.1%} right")
        if self.details:
            parts += [f"lr {row['lr']:.1e}", *self.share_of_peak(row, speed)]
            parts.append(f"{used_bytes() / 1e9:.1f} GB")
        return parts

    def share_of_peak(self, row: Row, speed: float) -> list[str]:
        """Nothing where the peak is unknown, or was measured wrongly: on a busy machine."""
        if self.peak is None:
            return []
        share = speed * row["flops"] / row["tokens"] / self.peak
        return [f"{share:.0%} of matmul peak"] if share <= 1 else []
