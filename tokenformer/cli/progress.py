"""Progress of a command: a bar on a terminal, elsewhere a line every ten seconds."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

SECONDS_BETWEEN_LINES = 10.0

ShowProgress = Callable[[str, int, int], None]
"""Takes a description, how much is done, and the total, which is 0 if unknown."""


@contextmanager
def progress(console: "Console") -> Iterator[ShowProgress]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    if not console.is_terminal:
        printed = time.monotonic()

        def show_line(description: str, done: int, total: int) -> None:
            nonlocal printed
            if time.monotonic() - printed >= SECONDS_BETWEEN_LINES:
                printed = time.monotonic()
                fraction = f"{done / total:.0%}  " if total else ""
                console.print(fraction + description, markup=False)

        yield show_line
        return
    description_column = TextColumn("{task.description}", markup=False)
    columns = (BarColumn(bar_width=None), description_column, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def show_bar(description: str, done: int, total: int) -> None:
            if done < bar.tasks[0].completed:  # the next task has begun
                bar.reset(task)
            bar.update(task, completed=done, total=total or None, description=description)

        yield show_bar
