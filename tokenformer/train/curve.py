"""The picture of a run: training and held-out loss over tokens."""

from pathlib import Path

Row = dict[str, float]


def draw_loss(rows: list[Row], path: Path, title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(
        [r["tokens"] for r in rows], [r["loss"] for r in rows], lw=1, alpha=0.5, label="training"
    )
    validated = [r for r in rows if "val_loss" in r]
    axes.plot(
        [r["tokens"] for r in validated],
        [r["val_loss"] for r in validated],
        marker="o",
        label="held out",
    )
    axes.set(xlabel="tokens", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
