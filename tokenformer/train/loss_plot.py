"""Plot the training and held-out loss of a run over tokens or images, with points of growth."""

from itertools import pairwise
from pathlib import Path
from statistics import mean

from tokenformer.train.metrics import Row


def draw_loss(rows: list[Row], path: Path, title: str, unit: str = "tokens") -> None:
    """`unit`: tokens or images."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    # Losses of single batches are noisy: plot about a hundred means of consecutive ones.
    window = max(1, len(rows) // 100)
    chunks = [rows[start : start + window] for start in range(0, len(rows), window)]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(
        [chunk[-1]["tokens"] for chunk in chunks],
        [mean(row["loss"] for row in chunk) for chunk in chunks],
        alpha=0.6,
        label="training" if window == 1 else f"training, mean of {window} steps",
    )
    if validated := [r for r in rows if "val_loss" in r]:
        axes.plot(
            [r["tokens"] for r in validated],
            [r["val_loss"] for r in validated],
            marker="o",
            label="held out",
        )
    for before, after in pairwise(rows):
        if after.get("stage") != before.get("stage"):
            axes.axvline(before["tokens"], color="grey", linewidth=0.8, linestyle="--")
            axes.annotate(
                "grown",
                (before["tokens"], 1),
                xycoords=("data", "axes fraction"),
                xytext=(3, -12),
                textcoords="offset points",
                color="grey",
            )
    axes.set(xlabel=unit, ylabel=f"loss (nats per {unit.removesuffix('s')})", title=title)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
