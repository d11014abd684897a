"""Plot a results file: how close each benchmark comes to the limit of the machine.

python -m benchmarks.plot benchmarks/results/NAME.json --out NAME.png
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.results import Row

# Colour-blind safe; an implementation has the same colour in every panel.
OURS, SECOND, THIRD, FOURTH = "#0072b2", "#56b4e9", "#009e73", "#cc79a7"
FORMULA, PEER = "#d55e00", "#6b6b6b"
COLOURS = {
    "direct": OURS,
    "auto": OURS,
    "fp32": OURS,
    "tokenformer": OURS,
    "from_pretrained": OURS,
    "on disk": OURS,
    "streamed": THIRD,
    "bf16": SECOND,
    "int8": THIRD,
    "int4": FOURTH,
    "reference": SECOND,
    "Transformer": SECOND,
    "in memory": SECOND,
    "released": FORMULA,
    "plain": FORMULA,
}
INK, PALE = "0.35", "0.92"
BAR = 0.24
LEGEND_SPACE = 1.2


def colour(name: str) -> str:
    """Return the colour of an implementation; those not listed are peers."""
    return COLOURS.get(name.partition(",")[0], PEER)


def draw(results: Row, path: Path) -> None:
    """Draw a panel for every section in the results."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [panel for section, panel in PANELS if section in results and results[section]["rows"]]
    if not panels:
        raise ValueError(f"no section to draw; the file has {', '.join(results) or 'nothing'}")
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    # Not pyplot, which would change the caller's backend and figures.
    figure = Figure(figsize=(5 * columns, 3.7 * rows + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, panel in zip(grid, panels, strict=False):
        panel(axes, results)
        axes.tick_params(length=0, colors=INK, labelsize=8)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color("0.8")
        axes.set_axisbelow(True)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    machine = results["machine"]
    threads = f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    figure.suptitle(
        f"tokenformer {machine['tokenformer']} on {machine['cpu']}, {threads}, "
        f"torch {machine['torch']}, fp32",
        color=INK,
        fontsize=10,
    )
    figure.savefig(path, dpi=150)


def names_of(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["name"] for row in rows))


def ratio_axis(axes: Any, title: str, label: str) -> None:
    """Label the axis of a ratio and draw the line where both are equal."""
    axes.set_title(title, fontsize=10.5, loc="left")
    axes.set_ylabel(label, color=INK, fontsize=9)
    axes.axhline(1, color="0.6", linewidth=1, linestyle=(0, (3, 3)))
    axes.grid(color=PALE, axis="y")


def share_axis(axes: Any, title: str, limit: str) -> None:
    ratio_axis(axes, title, f"share of {limit}")
    axes.set_ylim(0, max(1.08, 1.05 * axes.get_ylim()[1]))


def lines(axes: Any, rows: list[Row], x: str, y: str, spread: str | None = None) -> None:
    for name in names_of(rows):
        points = sorted((row for row in rows if row["name"] == name), key=lambda row: row[x])
        error = [row[spread] / 2 for row in points] if spread else None
        axes.errorbar(
            [row[x] for row in points],
            [row[y] for row in points],
            yerr=error,
            color=colour(name),
            marker="os^D"[len(name) % 4],
            markersize=4,
            linewidth=1.8,
            linestyle="-" if colour(name) != PEER else (0, (4, 2)),
            capsize=2,
            label=name,
        )
    ticks = sorted({row[x] for row in rows})
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()


def bars(axes: Any, rows: list[Row], cases: dict[str, list[Row]], value: str) -> None:
    """Draw a group of bars per case and a labelled bar per implementation."""
    names = names_of(rows)
    bar = min(BAR, 0.84 / len(names))
    for group, case_rows in enumerate(cases.values()):
        for row in case_rows:
            at = group + bar * (names.index(row["name"]) - (len(names) - 1) / 2)
            error = row.get(f"{value}_spread", 0) / 2
            axes.bar(at, row[value], 0.92 * bar, yerr=error, color=colour(row["name"]), ecolor=INK)
            axes.annotate(
                f"{row[value]:.{2 if bar == BAR else 1}f}",
                (at, row[value] + error),
                xytext=(0, 2),
                textcoords="offset points",
                horizontalalignment="center",
                fontsize=7,
                color=INK,
            )
    group_axis(axes, list(cases))


def group_axis(axes: Any, cases: list[str]) -> None:
    axes.set_xticks(range(len(cases)), cases)
    axes.set_xlim(-0.6, len(cases) - 0.4)


def legend(axes: Any, names: list[str]) -> None:
    """Put the legend above the bars and extend the axis to fit it."""
    from matplotlib.patches import Patch

    axes.set_ylim(0, LEGEND_SPACE * axes.get_ylim()[1])
    handles = [Patch(color=colour(name), label=name) for name in names]
    look = {"frameon": False, "fontsize": 8, "handlelength": 1.0, "columnspacing": 1.0}
    axes.legend(handles=handles, loc="upper left", ncols=3, **look)


def widest_sweep(rows: list[Row], axis: str, others: tuple[str, ...]) -> list[Row]:
    """Return the largest group of rows that differ only in `axis`."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(other) for other in others), []).append(row)
    return max(groups.values(), key=lambda group: len({row[axis] for row in group}))


def operator(axes: Any, results: Row) -> None:
    rows = widest_sweep(results["operator"]["rows"], "n", ("rows", "d"))
    lines(axes, rows, "n", "share", "share_spread")
    title = f"Pattention, forward and backward\n{rows[0]['rows']:,} rows, width {rows[0]['d']}"
    share_axis(axes, title, "matmul speed")
    axes.set_xlabel("parameter tokens", color=INK, fontsize=9)
    axes.legend(frameon=False, fontsize=8, loc="lower right", ncols=2)


def training(axes: Any, results: Row) -> None:
    rows = results["training"]["rows"]
    rows = [row for row in rows if (row["length"], row["n"]) == (rows[0]["length"], rows[0]["n"])]
    cases: dict[str, list[Row]] = {}
    for row in rows:
        cases.setdefault(f"{row['what']}\npeer: {row['peer']}", []).append(with_peer_name(row))
    shown = [row for group in cases.values() for row in group]
    bars(axes, shown, cases, "share")
    shape = f"{rows[0]['batch']} x {rows[0]['length']} tokens"
    share_axis(axes, f"Training step, prefill, encoder layers\n{shape}", "matmul speed")
    legend(axes, names_of(shown))


def narrow(axes: Any, results: Row) -> None:
    rows = [row for row in results["narrow"]["rows"] if row["name"] != "nanoGPT"]
    cases: dict[str, list[Row]] = {}
    for row in rows:
        cases.setdefault(
            row["case"].replace(": ", "\n").replace("layers, ", "layers\n"), []
        ).append(row)
    bars(axes, rows, cases, "times_nanoGPT")
    ratio_axis(axes, "Training step of small models\noptimizer included", "speedup over nanoGPT")
    legend(axes, names_of(rows))


def with_peer_name(row: Row) -> Row:
    """Rename a peer to `peer`, so that all share a colour; the axis label names it."""
    return {**row, "name": "peer"} if row["name"] == row["peer"] else row


def decode(axes: Any, results: Row) -> None:
    rows = [row for row in results["decode"]["rows"] if row["name"] != "GPT-NeoX"]
    # Short prompts are measured for their first token; batches of 2 and 4 are between 1 and 8.
    rows = [row for row in rows if row["context"] != 16 and row["batch"] not in (2, 4)]
    cases: dict[str, list[Row]] = {}
    for row in rows:
        case = f"{row['parameters'] / 1e6:.0f}M\nafter {row['context']:,}\nbatch {row['batch']}"
        cases.setdefault(case, []).append(row)
    bars(axes, rows, cases, "times_GPT-NeoX")
    ratio_axis(axes, "Decoding\none token at a time", "speedup over GPT-NeoX")
    legend(axes, names_of(rows))


def memory(axes: Any, results: Row) -> None:
    layers = [row for row in results["memory"]["rows"] if row["what"] == "layer"]
    rows = layers or results["memory"]["rows"]
    cases: dict[str, list[Row]] = {}
    for row in rows:
        cases.setdefault(row["case"].replace(" x ", " x\n", 1), []).append(row)
    names = names_of(rows)
    for group, case_rows in enumerate(cases.values()):
        for row in case_rows:
            at = group + 0.16 * (names.index(row["name"]) - (len(names) - 1) / 2)
            axes.bar(at, row["peak_bytes"] / 1e9, 0.145, color=colour(row["name"]))
            # The pale part of a bar is saved for the backward pass.
            axes.bar(at, row["saved_bytes"] / 1e9, 0.145, color="white", alpha=0.45)
    group_axis(axes, list(cases))
    axes.set_title(
        "Peak memory, forward and backward\nrows x width x tokens; pale: saved for backward",
        fontsize=10.5,
        loc="left",
    )
    axes.set_ylabel("GB beyond the inputs", color=INK, fontsize=9)
    axes.grid(color=PALE, axis="y")
    legend(axes, names)


def loading(axes: Any, results: Row) -> None:
    rows = [row for row in results["loading"]["rows"] if row["what"] == "repeated"]
    cases: dict[str, list[Row]] = {}
    for row in rows:
        name, _, read = row["name"].partition(", ")
        case = f"{row['size']}\n{'with weights read' if read else 'loaded'}"
        seconds = {"seconds": row["seconds"], "name": name}
        seconds["times_reading"] = 1 / row["share"]
        cases.setdefault(case, []).append(seconds)
    shown = [row for group in cases.values() for row in group]
    bars(axes, shown, cases, "times_reading")
    ratio_axis(axes, "Loading a folder\nin the page cache", "time / reading its files once")
    legend(axes, names_of(shown))


def growth(axes: Any, results: Row) -> None:
    rows = results["growth"]["rows"]
    cases: dict[str, list[Row]] = {}
    for row in rows:
        cases.setdefault(row["case"], []).append(row)
    bars(axes, rows, cases, "times_copy")
    ratio_axis(
        axes, "Growing a folder\nread, grown, written, synced", "time / copying the grown folder"
    )
    legend(axes, names_of(rows))


def llama_cpp(axes: Any, results: Row) -> None:
    rows = [row for row in results["llama_cpp"]["rows"] if "times_llama" in row]
    cases: dict[str, list[Row]] = {}
    for row in rows:
        # Faster is higher, as in the other panels of speed.
        shown = {"name": row["name"], "speedup": 1 / row["times_llama"]}
        shown["speedup_spread"] = row["times_llama_spread"] / row["times_llama"] ** 2
        case = f"{row['parameters'] / 1e6:.0f}M\nafter {row['context']:,}"
        cases.setdefault(case, []).append(shown)
    shown_rows = [row for group in cases.values() for row in group]
    bars(axes, shown_rows, cases, "speedup")
    ratio_axis(axes, "Decoding\nat equal bytes per weight", "speedup over llama.cpp")
    legend(axes, names_of(shown_rows))


def startup(axes: Any, results: Row) -> None:
    rows = results["startup"]["rows"]
    for at, row in enumerate(rows):
        peer = "transformers" in row["name"] or "GPT-NeoX" in row["name"]
        ours = OURS if row["name"] != "import torch" else PALE
        axes.barh(at, row["seconds"], 0.7, color=PEER if peer else ours)
        axes.annotate(
            f"{row['seconds']:.1f}",
            (row["seconds"], at),
            xytext=(3, 0),
            textcoords="offset points",
            verticalalignment="center",
            fontsize=7,
            color=INK,
        )
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.invert_yaxis()
    axes.set_title("Start-up\nwhole commands", fontsize=10.5, loc="left")
    axes.set_xlabel("CPU seconds", color=INK, fontsize=9)
    axes.grid(color=PALE, axis="x")


PANELS: list[tuple[str, Callable[[Any, Row], None]]] = [
    ("operator", operator),
    ("narrow", narrow),
    ("training", training),
    ("decode", decode),
    ("llama_cpp", llama_cpp),
    ("memory", memory),
    ("loading", loading),
    ("growth", growth),
    ("startup", startup),
]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, help="default: next to the results")
    options = parser.parse_args(arguments)
    out = options.out or options.results.with_suffix(".png")
    draw(json.loads(options.results.read_text()), out)
    print(f"plot saved to {out.name}")


if __name__ == "__main__":
    main()
