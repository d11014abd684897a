"""Tables and plots of the growth study."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import mean

from experiments.exhibit import Table
from experiments.job import Result, Summary
from experiments.language import LanguageRun
from experiments.plots import (
    BASELINE,
    GREEN,
    INK,
    LIGHT,
    ORANGE,
    OURS,
    PALE,
    label,
    mean_curve,
    new_figure,
    put_dots,
    save,
)

Curves = dict[int, list[tuple[float, float]]]
"""(learning rate, bits per byte) by tokens."""
Panels = dict[tuple[int, int, str], Curves]
"""Curves by width, layers and rate law."""
BY_TOKENS = {8: LIGHT, 32: OURS, 64: GREEN, 128: "#e69f00"}
DRAWN = {
    "grown, shrink": OURS,
    "grown, random": LIGHT,
    "from scratch": ORANGE,
    "small, never grown": GREEN,
    "Transformer": BASELINE,
}
"""Arms in the plot of the loss over compute."""


def rate_curves(rows: Iterable[tuple[LanguageRun, Result]]) -> Curves:
    curves = defaultdict(list)
    for run, row in rows:
        assert run.model.tokens is not None
        curves[run.model.tokens].append((run.rate, row["bits_per_byte"]))
    return {tokens: sorted(points) for tokens, points in sorted(curves.items())}


def rate_table(panels: Panels) -> Table:
    header = ["width, layers, rate law", "tokens", "bits per byte by learning rate", "best rate"]
    rows = []
    for (width, layers, law), curves in panels.items():
        for tokens, points in curves.items():
            cells = ", ".join(f"{rate:g}: {bits:.3f}" for rate, bits in points)
            best = min(points, key=lambda point: point[1])
            rows.append([f"{width}, {layers}, {law}", str(tokens), cells, f"{best[0]:g}"])
    return Table([header, *rows])


def arm_table(title: str, arms: dict[str, Summary]) -> Table:
    rows = [
        [name, f"{s.mean:.3f}", f"{min(s.values):.3f}-{max(s.values):.3f}"]
        for name, s in arms.items()
    ]
    return Table([[title, "mean", "range"], *rows])


def draw_rates(panels: Panels, path: Path) -> None:
    figure, grid = new_figure(9, 3.9 * ((len(panels) + 1) // 2), (len(panels) + 1) // 2, 2)
    ticks = sorted({rate for c in panels.values() for points in c.values() for rate, _ in points})
    for axes, ((width, layers, law), curves) in zip(grid, panels.items(), strict=False):
        for tokens, points in curves.items():
            colour = BY_TOKENS[tokens]
            rates, bits = zip(*points, strict=True)
            axes.plot(
                rates, bits, "o-", color=colour, markersize=3.5, label=f"{tokens} and {4 * tokens}"
            )
            best = min(points, key=lambda point: point[1])
            axes.plot(*best, "o", color=colour, markersize=9, fillstyle="none")
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{1000 * tick:g}e-3" for tick in ticks], fontsize=8)
        axes.minorticks_off()
        title = "one rate for all layers" if law == "none" else "rate_law: tokens"
        label(axes, "learning rate", title=f"{title}\nwidth {width}, {layers} layers")
    for pair in (grid[:2], grid[2:]):  # the panels of a line share their scale
        low = min(axes.get_ylim()[0] for axes in pair)
        high = max(axes.get_ylim()[1] for axes in pair)
        for axes in pair:
            axes.set_ylim(low, high)
        label(pair[0], "learning rate", "held-out bits per byte")
    grid[0].legend(
        frameon=False,
        fontsize=8,
        title="attention and feed-forward tokens",
        title_fontsize=8,
    )
    save(figure, path)


def draw_arms(comparisons: dict[str, dict[str, Summary]], path: Path) -> None:
    """A panel per comparison, one line per arm: a dot per seed, and the mean."""
    from matplotlib.figure import Figure

    heights = [len(arms) for arms in comparisons.values()]
    figure = Figure(figsize=(8, 0.34 * sum(heights) + 1.0 * len(heights)), layout="constrained")
    panels = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, arms) in zip(panels, comparisons.items(), strict=True):
        dots = {name: summary.values for name, summary in arms.items()}
        put_dots(axes, dots, [name for name in arms if name.startswith("grown, ")])
        axes.margins(y=0.05)
        axes.set_title(title, fontsize=10, loc="left")
        axes.grid(color=PALE, axis="x")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK, labelsize=9)
    panels[-1].set_xlabel("held-out bits per byte at equal compute; a dot is a seed", color=INK)
    save(figure, path)


def draw_curves(arms: dict[str, list[Result]], title: str, path: Path) -> None:
    """The loss over compute, mean over the seeds, which all validate at the same steps."""
    figure, (axes,) = new_figure()
    for name, colour in DRAWN.items():
        points = mean_curve([row["curve"] for row in arms[name]])
        compute = [flops / 1e12 for _, flops, _ in points]
        bits = [bits for _, _, bits in points]
        width = 2.4 if name == "grown, shrink" else 1.4
        axes.plot(compute, bits, color=colour, linewidth=width, label=f"{name}  {bits[-1]:.3f}")
    axes.set_ylim(top=min(3.9, mean(axes.get_ylim()) + 1))
    label(
        axes,
        "training compute, 1e12 FLOPs",
        "held-out bits per byte",
        f"{title}, mean of the seeds",
    )
    axes.legend(frameon=False, fontsize=9)
    save(figure, path)
