"""The live display of a run: a bar with loss, tokens/s and time left, or plain lines in a log."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

Row = dict[str, float]


class Display(Protocol):
    def __call__(self, row: Row) -> None:
        """Show one row of metrics."""
        ...


@contextmanager
def progress(console: Console, steps: int) -> Iterator[Display]:
    """A display for a run of `steps` steps: live on a terminal, ten lines in all elsewhere."""
    if not console.is_terminal:
        every = max(1, steps // 10)

        def show_line(row: Row) -> None:
            if int(row["step"]) % every == 0 or row["step"] == steps:
                console.print(f"step {row['step']:.0f}/{steps}  {describe(row)}", highlight=False)

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


def describe(row: Row) -> str:
    speed = row["tokens"] / row["seconds"]
    parts = [f"loss {row['loss']:.3f}", f"{speed:,.0f} tokens/s"]
    if "val_bpb" in row:
        parts.insert(1, f"held out {row['val_bpb']:.3f} bits/byte")
    return "  ".join(parts)
