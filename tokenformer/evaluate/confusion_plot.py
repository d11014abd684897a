"""The picture of a classifier's mistakes: of every class, which share was taken for which."""

from pathlib import Path

import numpy as np

from tokenformer.evaluate.classification import Classification

MOST_NAMED = 30
"""Classes whose names and shares can still be read."""


def draw_confusion(found: Classification, path: Path, title: str) -> None:
    from matplotlib.figure import Figure

    totals = found.confusion.sum(1, keepdims=True)
    shares = found.confusion / np.maximum(totals, 1)  # rows sum to 1, or 0 where there are none
    named = len(found.classes) <= MOST_NAMED
    side = 2 + 0.55 * len(found.classes) if named else 8
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.add_subplot()
    picture = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(picture, label="share of the class", shrink=0.8)
    if named:
        places = range(len(found.classes))
        axes.set_xticks(places, found.classes, rotation=45, ha="right")
        axes.set_yticks(places, found.classes)
        for row, column in zip(*np.nonzero(shares >= 0.005), strict=True):
            dark = shares[row, column] > 0.5
            axes.text(column, row, f"{shares[row, column]:.0%}", ha="center", va="center",
                      fontsize=7, color="white" if dark else "black")  # fmt: skip
    axes.set(xlabel="taken for", ylabel="is", title=f"{title}: {found.top_1:.1%} right")
    figure.savefig(path, dpi=150)
