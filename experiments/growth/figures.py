"""Tables and plots of the growth study, from the rows that `study.py` wrote.

    python experiments/growth/figures.py experiments/growth/results.jsonl --out docs/images

Writes rate-law.png (final loss over the learning rate, with and without the rate law),
growth-study.png (final losses of the ways to grow, one dot per seed) and growth-curves.png (their
loss over compute), and prints the tables.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from study import COMPARISONS, FACTORS, GROWN, RATES, Training, sizes

Row = dict[str, Any]
COMPUTE = Training().compute
"""Of the runs in rate-law.png."""
PANELS = [(128, 2, "none"), (128, 2, "tokens"), (64, 2, "tokens"), (128, 4, "tokens")]
"""Width, layers and rate law of the panels of rate-law.png."""
COLOURS = {8: "#56b4e9", 32: "#0072b2", 64: "#009e73", 128: "#e69f00"}
INK, PALE = "0.35", "0.92"


def read_rows(path: Path) -> dict[str, Row]:
    return {row["key"]: row for row in map(json.loads, path.read_text().splitlines())}


def shape_options(width: int, layers: int, rate_law: str) -> dict[str, Any]:
    """Return the options that the runs of one panel share."""
    default = Training()
    names = ("seed", "family", "decay", "embedding_rate")
    shared = {"compute": COMPUTE, **{name: getattr(default, name) for name in names}}
    return {**shared, "width": width, "layers": layers, "rate_law": rate_law}


def rate_curves(rows: Iterable[Row], **fixed: Any) -> dict[int, list[tuple[float, float]]]:
    """Return (rate, bits per byte) of the models from scratch with these options, by tokens."""
    curves = defaultdict(list)
    for row in rows:
        training = Training.from_row(row)
        if len(training.tokens) == 1 and all(getattr(training, k) == v for k, v in fixed.items()):
            curves[training.tokens[0]].append((training.rate, row["bits_per_byte"]))
    return {tokens: sorted(points) for tokens, points in sorted(curves.items()) if len(points) > 1}


def draw_rates(rows: list[Row], path: Path) -> None:
    from matplotlib.figure import Figure

    found = {panel: rate_curves(rows, **shape_options(*panel)) for panel in PANELS}
    panels = {panel: curves for panel, curves in found.items() if curves}
    if not panels:
        return
    lines = (len(panels) + 1) // 2
    figure = Figure(figsize=(9, 3.9 * lines), layout="constrained")
    grid = figure.subplots(lines, 2, squeeze=False, sharex=True, sharey="row")
    ticks = sorted({rate for rates in RATES.values() for rate in rates})
    for axes, ((width, layers, law), curves) in zip(grid.flat, panels.items(), strict=False):
        for tokens, points in curves.items():
            colour = COLOURS[tokens]
            rates, bits = zip(*points, strict=True)
            label = f"{tokens} and {sizes(tokens)['ffn_tokens']} tokens"
            axes.plot(rates, bits, "o-", color=colour, markersize=3.5, label=label)
            best = min(points, key=lambda point: point[1])
            axes.plot(*best, "o", color=colour, markersize=9, fillstyle="none")
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{1000 * tick:g}e-3" for tick in ticks])
        axes.minorticks_off()
        axes.grid(color=PALE)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK, labelsize=8)
        axes.set_xlabel("learning rate", color=INK, fontsize=9)
        title = "one rate for all layers" if law == "none" else "rate_law: tokens"
        axes.set_title(f"{title}\nwidth {width}, {layers} layers", fontsize=10, loc="left")
    for line in grid:
        line[0].set_ylabel("held-out bits per byte", color=INK, fontsize=9)
    grid[0][0].legend(
        frameon=False, fontsize=8, title="attention and feed-forward", title_fontsize=8
    )
    figure.savefig(path, dpi=150)


def draw_arms(comparisons: dict[str, dict[str, list[Row]]], path: Path) -> None:
    """A panel per comparison, one line per arm: a dot per seed, and the mean."""
    from matplotlib.figure import Figure

    heights = [len(arms) for arms in comparisons.values()]
    figure = Figure(figsize=(8, 0.34 * sum(heights) + 1.3 * len(heights)), layout="constrained")
    panels = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, arms) in zip(panels, comparisons.items(), strict=True):
        for place, (name, rows) in enumerate(arms.items()):
            bits = [row["bits_per_byte"] for row in rows]
            colour = "#0072b2" if "grown, " in name else "#6b6b6b"
            axes.plot(bits, [place] * len(bits), "o", color=colour, alpha=0.45, markersize=5)
            axes.plot(mean(bits), place, "|", color=colour, markersize=16, markeredgewidth=2)
        axes.set_yticks(range(len(arms)), arms)
        axes.invert_yaxis()
        axes.set_title(title, fontsize=10, loc="left")
        axes.grid(color=PALE, axis="x")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(length=0, colors=INK, labelsize=9)
    panels[-1].set_xlabel("held-out bits per byte at equal compute; a dot is a seed", color=INK)
    figure.savefig(path, dpi=150)


DRAWN = {
    "grown, shrink": "#0072b2",
    "grown, random": "#56b4e9",
    "from scratch": "#d55e00",
    "small, never grown": "#009e73",
    "Transformer": "#6b6b6b",
}
"""Arms in the plot of the loss over compute."""


def draw_curves(arms: dict[str, list[Row]], title: str, path: Path) -> None:
    """The loss over compute, mean over the seeds, which all validate at the same steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, colour in DRAWN.items():
        points = list(zip(*(row["curve"] for row in arms.get(name, [])), strict=True))
        if points:
            compute = [seeds[0][1] / 1e12 for seeds in points]
            bits = [mean(bits for _, _, bits in seeds) for seeds in points]
            width = 2.4 if name == "grown, shrink" else 1.4
            axes.plot(compute, bits, color=colour, linewidth=width, label=f"{name}  {bits[-1]:.3f}")
    axes.set_ylim(top=3.9)
    axes.set_title(f"{title}, mean of the seeds", fontsize=10, loc="left")
    axes.set_xlabel("training compute, trillions of floating-point operations", color=INK)
    axes.set_ylabel("held-out bits per byte", color=INK)
    axes.grid(color=PALE)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def by_arm(rows: dict[str, Row]) -> dict[str, dict[str, list[Row]]]:
    """Return the finished runs of every comparison and arm, one per seed."""
    found: dict[str, dict[str, list[Row]]] = {}
    for title, arms in COMPARISONS.items():
        for name, arm in arms.items():
            seeds = [replace(arm, seed=seed).key for seed in range(10)]
            if finished := [rows[key] for key in seeds if key in rows]:
                found.setdefault(title, {})[name] = finished
    return found


def print_arms(comparisons: dict[str, dict[str, list[Row]]]) -> None:
    for title, arms in comparisons.items():
        print(f"\n| {title} | mean | seeds |\n|---|---|---|")
        for name, rows in arms.items():
            bits = [row["bits_per_byte"] for row in rows]
            print(f"| {name} | {mean(bits):.3f} | {', '.join(f'{b:.3f}' for b in bits)} |")


def print_factors(rows: dict[str, Row]) -> None:
    print("\n| one change at a time | bits per byte |\n|---|---|")
    for name, training in {"grown, shrink": GROWN, **FACTORS}.items():
        if row := rows.get(training.key):
            print(f"| {name} | {row['bits_per_byte']:.3f} |")


def print_rates(rows: list[Row]) -> None:
    for width, layers, law in PANELS:
        print(f"\nwidth {width}, {layers} layers, rate_law: {law}")
        for tokens, points in rate_curves(rows, **shape_options(width, layers, law)).items():
            cells = "  ".join(f"{rate:.1e} {bits:.3f}" for rate, bits in points)
            best = min(points, key=lambda point: point[1])
            print(f"  {tokens:4} tokens: {cells}   best {best[0]:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of the plots")
    options = parser.parse_args()
    rows = read_rows(options.results)
    print_rates(list(rows.values()))
    draw_rates(list(rows.values()), options.out / "rate-law.png")
    if arms := by_arm(rows):
        print_arms(arms)
        print_factors(rows)
        draw_arms(arms, options.out / "growth-study.png")
        title, first = next(iter(arms.items()))
        draw_curves(first, title, options.out / "growth-curves.png")


if __name__ == "__main__":
    main()
