"""The style of all plots: colours, axes, loss curves, and dots per seed."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

INK, PALE = "0.35", "0.92"
OURS, LIGHT, BASELINE, GREEN, ORANGE, PINK = (
    "#0072b2",
    "#56b4e9",
    "#6b6b6b",
    "#009e73",
    "#d55e00",
    "#cc79a7",
)
COLOURS = (OURS, ORANGE, GREEN, LIGHT, PINK, BASELINE)
"""The first ones of Okabe and Ito's palette for the colour-blind."""


def new_figure(width: float = 8, height: float = 4.5, rows: int = 1, columns: int = 1) -> Any:
    """Return a figure and a list of its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.grid(color=PALE)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK, labelsize=9)
    return figure, list(grid.flat)


def label(axes: Any, x: str = "", y: str = "", title: str = "") -> None:
    axes.set_xlabel(x, color=INK, fontsize=9)
    axes.set_ylabel(y, color=INK, fontsize=9)
    if title:
        axes.set_title(title, fontsize=10, loc="left")


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=150)


def mean_curve(curves: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """Return the mean over seeds of curves with the same steps; the last column is averaged."""
    return [
        [*points[0][:-1], mean(point[-1] for point in points)]
        for points in zip(*curves, strict=True)
    ]


def draw_dots(arms: dict[str, Sequence[float]], path: Path, x: str, ours: Sequence[str]) -> None:
    """A line per arm: a dot per seed and the mean. `ours` are drawn in our colour."""
    figure, (axes,) = new_figure(8, 0.34 * len(arms) + 1.2)
    put_dots(axes, arms, ours)
    label(axes, x)
    save(figure, path)


def put_dots(axes: Any, arms: dict[str, Sequence[float]], ours: Sequence[str]) -> None:
    """Draw the lines of `draw_dots` on one of several axes."""
    for place, (name, values) in enumerate(arms.items()):
        colour = OURS if name in ours else BASELINE
        axes.plot(values, [place] * len(values), "o", color=colour, alpha=0.45, markersize=5)
        axes.plot(mean(values), place, "|", color=colour, markersize=16, markeredgewidth=2)
    axes.set_yticks(range(len(arms)), arms)
    axes.margins(y=0.15)
    axes.invert_yaxis()
    axes.spines[["left"]].set_visible(False)
    axes.tick_params(length=0)
