"""Tables and plots of the study of interpretability."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import mean
from typing import Any

from experiments.exhibit import Table
from experiments.interpretability.measurement import SHARES
from experiments.job import Result, Summary
from experiments.plots import BASELINE, COLOURS, GREEN, INK, OURS, label, new_figure, save

SPECIFIC = 5
"""A set that controls a behavior raises its loss this many times as much as the loss elsewhere."""
TENTH = SHARES.index(0.1)
NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"
PERCENT = ", ".join(f"{100 * share:g}" for share in SHARES) + " %"
Layers = dict[str, dict[str, list[float]]]
"""By layer, what `Sparsity` measures."""
Sparse = Mapping[str, tuple[Layers, Layers]]
"""Trained and untrained, by model."""
Controls = Mapping[tuple[str, float], Sequence[Result]]
"""A row per seed, by behavior and the rise that was asked for."""


def rise_of(row: Result, without: str, of: str = "loss") -> float:
    """Return the rise of a loss without a set of tokens: `after`, `busiest` or `random`, of which
    it is the mean."""
    rows = row[without] if without == "random" else [row[without]]
    return mean(each[of] for each in rows) - row["before"][of]


def is_controlled(row: Result, asked: float) -> bool:
    """Whether the tokens found control the behavior on held-out text: they raise its loss by at
    least half of what was asked for, `SPECIFIC` times as much as the loss elsewhere, and twice as
    much as the tokens of any baseline do."""
    rise, start = rise_of(row, "after"), row["before"]["loss"]
    baseline = max(each["loss"] - start for each in (row["busiest"], *row["random"]))
    least = max(asked / 2, SPECIFIC * rise_of(row, "after", "elsewhere"), 2 * baseline)
    return row["reached"] and rise >= least


def found_in(rows: Sequence[Result]) -> list[Result]:
    """Leave out the rows of texts that lack the behavior, as the small ones of a smoke run may."""
    return [row for row in rows if "tokens" in row]


def control_table(title: str, controls: Controls) -> Table:
    header = [title, "asked", "tokens", "loss", "rise without them", "elsewhere"]
    header += ["without the busiest", "without random ones", "accuracy", "controlled"]
    lines = [header]
    for (behavior, asked), all_rows in controls.items():
        rows = found_in(all_rows)
        if not rows:
            continue
        sets = ((w, "loss") for w in ("after", "busiest", "random"))
        rise, busiest, random = (signed([rise_of(r, *each) for r in rows]) for each in sets)
        accuracy = [mean(row[at]["accuracy"] for row in rows) for at in ("before", "after")]
        lines.append(
            [
                behavior,
                f"{asked:g}",
                ", ".join(f"{len(r['tokens'])}{'' if r['reached'] else ' (missed)'}" for r in rows),
                f"{mean(row['before']['loss'] for row in rows):.2f}",
                rise,
                signed([rise_of(row, "after", "elsewhere") for row in rows]),
                busiest,
                random,
                " → ".join(f"{100 * share:.0f} %" for share in accuracy),
                f"{sum(is_controlled(row, asked) for row in rows)} of {len(rows)}",
            ]
        )
    return Table(lines)


def signed(values: Sequence[float]) -> str:
    summary = Summary(tuple(values))
    return f"{summary.mean:+.2f}" + (f" ± {summary.spread:.2f}" if len(values) > 1 else "")


def sparsity_table(sparse: Sparse) -> Table:
    """Means over the blocks, of trained and untrained models."""
    header = ["", f"work of the top {PERCENT} at each position", "untrained"]
    header += ["output that the top 10 % explain", "untrained", "work of the same 10 % everywhere"]
    lines = [[*header, "untrained"]]
    for title, pair in sparse.items():
        for projection in ("q", "k", "v", "o", "ffn"):
            cells = []
            for found in ("work", "explained", "always"):
                for layers in pair:
                    rows = [each[found] for n, each in layers.items() if n.endswith(projection)]
                    means = [mean(column) for column in zip(*rows, strict=True)]
                    shown = means if found == "work" else [means[TENTH]]
                    cells.append(", ".join(f"{100 * share:.0f}" for share in shown) + " %")
            lines.append([f"{title}: {projection}", *cells])
    return Table(lines)


def clear_table(title: str, tokens: Sequence[Result]) -> Table:
    header = [title, "fires most at", "its value promotes", "selectivity", "positions"]
    lines = [[*header, "text that its contexts share", "held out: precision, recall"]]
    for each in tokens:
        places = [code(*context) for context in each["contexts"]]
        scores = [percent(each[name]) for name in ("precision", "recall")]
        lines.append(
            [
                each["token"],
                "<br>".join(places),
                " ".join(map(code, each["promotes"])),
                f"{each['selectivity']:.2f}",
                f"{100 * each['frequency']:.1f} %",
                code(each["pattern"]),
                ", ".join(scores),
            ]
        )
    return Table(lines)


def percent(value: float | None) -> str:
    return "none" if value is None else f"{100 * value:.0f} %"


def code(text: str, fired: str = "", after: str = "") -> str:
    """Return a text as it is, in a cell of a table; the part that fired is marked."""
    if not text + fired:
        return ""
    marked = f"<mark>{plain(fired)}</mark>" if fired else ""
    return f"<code>{plain(text)}{marked}{plain(after)}</code>"


def plain(text: str) -> str:
    html = escape(text.replace("\n", "↵").replace(" ", NO_BREAK_SPACE), quote=False)
    return html.translate({ord(c): f"&#{ord(c)};" for c in "|[]*_`\\"})


def growth_table(growth: Mapping[str, Sequence[Result]]) -> Table:
    header = ["means over layers and seeds", "bits per byte", "work of the new", "selectivity, old"]
    header += [
        "new",
        "dead, old",
        "new",
        "loss without some old tokens",
        "without as many new",
        "without all new",
    ]
    lines = [header]
    for init, rows in growth.items():
        old, new = (ages(rows, age) for age in (0, 1))
        lines.append(
            [
                f"`{init}`",
                Summary(tuple(row["bits_per_byte"] for row in rows)).format(),
                f"{100 * mean(each['work'] for each in new):.0f} %",
                *(f"{mean(e['selectivity'] for e in each):.2f}" for each in (old, new)),
                *(f"{100 * dead(each):.1f} %" for each in (old, new)),
                *(signed([row["rise"][age] for row in rows]) for age in ("0", "1")),
                signed([row["without_new"] for row in rows]),
            ]
        )
    return Table(lines)


def layer_table(growth: Mapping[str, Sequence[Result]]) -> Table:
    """Work of the new, selectivity of old and new, and dead new tokens, by layer."""
    header = [
        "work of the new; selectivity, old → new; dead new",
        *(f"`{init}`" for init in growth),
    ]
    lines: dict[str, list[str]] = {}
    for rows in growth.values():
        old = by_layer(rows, 0)
        for layer, new in by_layer(rows, 1).items():
            was, now = (mean(e["selectivity"] for e in each) for each in (old[layer], new))
            cell = f"{100 * mean(each['work'] for each in new):.0f} %; {was:.2f} → {now:.2f}"
            lines.setdefault(layer, [layer]).append(f"{cell}; {100 * dead(new):.1f} %")
    return Table([header, *lines.values()])


def ages(rows: Sequence[Result], age: int) -> list[Result]:
    return [each for row in rows for each in row["rows"] if each["age"] == age]


def dead(rows: Sequence[Result]) -> float:
    return sum(each["dead"] for each in rows) / sum(each["tokens"] for each in rows)


def page_table(pages: Sequence[Result]) -> Table:
    lines = [["bytes read", "core-seconds", "peak memory", "index", "page"]]
    for row in pages:
        sizes = [
            f"{row[name] / 1e6:,.0f} MB" for name in ("peak_bytes", "index_bytes", "site_bytes")
        ]
        lines.append([f"{row['positions']:,}", f"{row['core_seconds']:.0f}", *sizes])
    return Table(lines)


def draw_sparsity(sparse: Sparse, path: Path) -> None:
    """The work of the top tokens by layer: filled for trained models, hollow for untrained."""
    sizes = [len(trained) for trained, _ in sparse.values()]
    figure, panels = new_figure(11, 4, columns=len(sparse))
    panels[0].figure.axes[0].get_gridspec().set_width_ratios([4 + size for size in sizes])
    for axes, (title, pair) in zip(panels, sparse.items(), strict=True):
        for layers, marker in zip(pair, ("o-", "o:"), strict=True):
            for n, share in enumerate(SHARES):
                values = [each["work"][n] for each in layers.values()]
                hollow = {"markerfacecolor": "none"} if marker == "o:" else {}
                name = f"top {100 * share:g} %" + ("" if marker == "o-" else ", untrained")
                axes.plot(
                    values,
                    marker,
                    color=COLOURS[n],
                    markersize=4,
                    linewidth=0.8,
                    label=name,
                    **hollow,
                )
        axes.set_xticks(range(len(pair[0])), pair[0], rotation=90, fontsize=8)
        axes.set_ylim(0, 1)
        label(axes, "", "", title)
    label(panels[0], "", "share of the layer's work at a position", next(iter(sparse)))
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    save(figure, path)


def draw_control(controls: Mapping[str, Controls], path: Path) -> None:
    """A line per behavior: the rise of its loss and of that elsewhere; a dot per seed."""
    rows = {
        f"{corpus}: {behavior}, {asked:g} asked": found
        for corpus, each in controls.items()
        for (behavior, asked), all_rows in each.items()
        if (found := found_in(all_rows))
    }
    figure, (axes,) = new_figure(9, 0.42 * len(rows) + 1.4)
    kinds = {
        "behavior, without the tokens found": ("after", "loss", OURS, "o"),
        "elsewhere, without the tokens found": ("after", "elsewhere", GREEN, "s"),
        "behavior, without the busiest tokens": ("busiest", "loss", "#d55e00", "^"),
        "behavior, without random tokens": ("random", "loss", BASELINE, "x"),
    }
    for title, (without, of, colour, marker) in kinds.items():
        points = [
            (rise_of(row, without, of), place)
            for place, each in enumerate(rows.values())
            for row in each
        ]
        x, y = zip(*points, strict=True)
        axes.plot(x, y, marker, color=colour, markersize=5, alpha=0.75, label=title)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.axvline(0, color=INK, linewidth=0.8)
    label(axes, "rise of the held-out loss, nats; a mark is a seed")
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.35, -0.1), ncols=2)
    save(figure, path)


def draw_growth(growth: Mapping[str, Sequence[Result]], path: Path) -> None:
    """Old and new tokens: work and selectivity by layer, means of the seeds, and the loss without
    some of them, a mark per seed."""
    figure, (work, selectivity, loss) = new_figure(11, 3.8, columns=3)
    for place, (init, rows) in enumerate(growth.items()):
        old, new = ([*by_layer(rows, age).values()] for age in (0, 1))
        colour = COLOURS[place]
        style: dict[str, Any] = {"color": colour, "markersize": 4, "linewidth": 0.8}
        relative = [per_token(n) / per_token(o) for n, o in zip(new, old, strict=True)]
        work.plot(relative, "o-", label=init, **style)
        for found, age, line, fill in ((new, "1", "-", colour), (old, "0", ":", "none")):
            means = [mean(row["selectivity"] for row in each) for each in found]
            selectivity.plot(means, f"o{line}", markerfacecolor=fill, **style)
            rises = [row["rise"][age] for row in rows]
            loss.plot([place] * len(rises), rises, "o", markerfacecolor=fill, **style)
    layers = list(by_layer(next(iter(growth.values())), 0))
    for axes, title, ticks in (
        (work, "work of an average new token, old = 1", layers),
        (selectivity, "selectivity: new (filled), old (hollow)", layers),
        (loss, "rise of the loss without some new, old", list(growth)),
    ):
        axes.set_xticks(range(len(ticks)), ticks, rotation=90 if ticks is layers else 0, fontsize=8)
        label(axes, title=title)
    for axes in (work, selectivity):
        axes.set_ylim(bottom=0)
    work.axhline(1, color=INK, linewidth=0.8)
    loss.axhline(0, color=INK, linewidth=0.8)
    loss.margins(x=0.2)
    label(loss, y="nats; an eighth of every layer is off", title=loss.get_title(loc="left"))
    work.legend(frameon=False, fontsize=8, title="init", title_fontsize=8)
    save(figure, path)


def by_layer(rows: Sequence[Result], age: int) -> dict[str, list[Result]]:
    """Return what all seeds say about the tokens of an age, by layer."""
    found: dict[str, list[Result]] = {}
    for each in ages(rows, age):
        found.setdefault(each["layer"], []).append(each)
    return found


def per_token(rows: Sequence[Result]) -> float:
    return sum(each["work"] for each in rows) / sum(each["tokens"] for each in rows)
