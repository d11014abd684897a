"""Plot runs side by side: held-out loss over training compute, with the point of growth."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenformer.train.metrics import Row

# Readable on white and safe for colour-blind readers.
COLOURS = ("#0072b2", "#d55e00", "#6b6b6b", "#009e73")
LABEL_GAP = 0.125
"""Minimum distance of the labels at the ends of the curves, as a share of the axis."""

MARGIN_BELOW = 0.24
"""Space for text below the lowest curve, as a share of the axis."""


@dataclass(frozen=True)
class Curve:
    name: str
    detail: str
    """Second line of the label."""
    rows: list[Row]
    grown_at: int | None = None
    """Step at which the model grew."""

    @property
    def points(self) -> list[tuple[float, float]]:
        """(TFLOPs, bits per byte) of each validation."""
        return [(row["flops"] / 1e12, row["val_bpb"]) for row in self.rows if "val_bpb" in row]


def draw_comparison(
    curves: list[Curve], path: Path, *, title: str, subtitle: str, growth: str
) -> None:
    """Draw the curves, the most important first, labelled at their ends; `growth` is the text
    beside the point of growth."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Not pyplot, which would change the caller's backend and open figures.
    figure = Figure(figsize=(8, 4.5))
    FigureCanvasAgg(figure)
    figure.subplots_adjust(left=0.075, right=0.75, top=0.83, bottom=0.12)
    axes = figure.add_subplot()
    for place, (curve, colour) in reversed(list(enumerate(zip(curves, COLOURS, strict=False)))):
        x, y = zip(*curve.points, strict=True)
        axes.plot(
            x, y, color=colour, linewidth=1.8 if place else 2.8, zorder=len(curves) - place + 2
        )
        axes.plot(x[-1:], y[-1:], "o", color=colour, markersize=5, zorder=len(curves) + 2)
    axes.set_xlim(left=0)
    low, high = axes.get_ylim()
    axes.set_ylim(low - MARGIN_BELOW * (high - low), high)
    label_ends(axes, curves)
    for curve, colour in zip(curves, COLOURS, strict=False):
        if curve.grown_at is not None:
            mark_growth(axes, curve, colour, growth)
    axes.set_xlabel("training compute, trillions of floating-point operations")
    axes.grid(color="0.92", axis="y")
    axes.tick_params(length=0, colors="0.35")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("0.8")
    figure.text(0.02, 0.94, title, fontsize=14, fontweight="bold", color="0.1")
    figure.text(0.02, 0.88, subtitle, fontsize=10, color="0.35")
    figure.savefig(path, dpi=150)


def label_ends(axes: Any, curves: list[Curve]) -> None:
    """Label the curves at their ends, moved apart where labels would overlap."""
    low, high = axes.get_ylim()
    ends = [curve.points[-1] for curve in curves]
    places = spread([y for _, y in ends], gap=LABEL_GAP * (high - low))
    right = max(x for x, _ in ends)
    for curve, colour, (_, y), place in zip(curves, COLOURS, ends, places, strict=False):
        axes.annotate(
            f"{curve.name}  {y:.3f}\n{curve.detail}",
            (right, place),
            xytext=(10, 0),
            textcoords="offset points",
            color=colour,
            fontsize=9,
            verticalalignment="center",
            annotation_clip=False,
        )


def spread(values: list[float], gap: float) -> list[float]:
    """Return the values moved apart to at least `gap`, with the same order and mean."""
    order = sorted(range(len(values)), key=values.__getitem__)
    placed = list(values)
    for lower, upper in pairwise(order):
        placed[upper] = max(placed[upper], placed[lower] + gap)
    drift = (sum(placed) - sum(values)) / len(values)
    return [value - drift for value in placed]


def mark_growth(axes: Any, curve: Curve, colour: str, text: str) -> None:
    x, y = next(
        (row["flops"] / 1e12, row["val_bpb"]) for row in curve.rows if row["step"] == curve.grown_at
    )
    axes.plot(
        [x], [y], "o", markersize=10, color="white", markeredgecolor=colour, markeredgewidth=2.5,
        zorder=20,
    )  # fmt: skip
    axes.annotate(
        text,
        (x, y),
        xytext=(-18, -16),
        textcoords="offset points",
        horizontalalignment="right",
        verticalalignment="top",
        color=colour,
        fontsize=9.5,
        fontweight="bold",
        annotation_clip=False,
    )
