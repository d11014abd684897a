"""Growth seen from inside: how much of the work old and new tokens do, layer by layer.

    view = growth_view(index)
    print(view)
    plot_growth(view, "growth.png")

The configuration of a model records which growth added each token (`token_ages`); the index holds
what every token does. A layer's work is the sum of |weight| * ||value|| over its tokens.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenformer.interpret.token_index import TokenIndex


@dataclass(frozen=True)
class Generation:
    """The tokens of one layer that one growth added; age 0 are those the model started with."""

    layer: str
    age: int
    tokens: int
    share: float
    """Its share of the layer's tokens."""
    work: float
    """Its share of the layer's work."""
    norm_share: float
    """Its share of the norm that divides the scores."""
    dead: int
    """Tokens that do less than a hundredth of an average token's work."""
    frequency: float
    """The mean share of positions at which a token of it fires; dead tokens count."""
    selectivity: float
    """The mean selectivity of its tokens that are not dead; higher is more specialized."""


class GrowthView(list[Generation]):
    """A row for every layer and age."""

    @property
    def ages(self) -> list[int]:
        return sorted({row.age for row in self})

    def asdict(self) -> list[dict[str, Any]]:
        return [asdict(row) for row in self]

    def __str__(self) -> str:
        titles = ("layer", "age", "tokens", "share", "work", "norm", "dead", "fires", "selective")
        lines = ["".join(title.rjust(10) for title in titles)]
        for row in self:
            cells = [row.layer, row.age, f"{row.tokens:,}", f"{row.share:.1%}", f"{row.work:.1%}"]
            cells += [f"{row.norm_share:.1%}", row.dead, f"{row.frequency:.1%}"]
            cells += [f"{row.selectivity:.2f}"]
            lines.append("".join(str(cell).rjust(10) for cell in cells))
        return "\n".join(lines)


def growth_view(index: TokenIndex) -> GrowthView:
    """Return what the tokens of every age do in every layer."""
    rows = GrowthView()
    for name, layer in index.layers.items():
        for age in layer.ages.unique().tolist():
            chosen = layer.ages == age
            alive = chosen & ~layer.dead
            selectivity = layer.selectivity[alive]
            rows.append(
                Generation(
                    layer=name,
                    age=age,
                    tokens=int(chosen.sum()),
                    share=chosen.double().mean().item(),
                    work=layer.work[chosen].sum().item(),
                    norm_share=layer.norm_share[chosen].sum().item(),
                    dead=int((chosen & layer.dead).sum()),
                    frequency=layer.frequency[chosen].mean().item(),
                    selectivity=selectivity.mean().item() if len(selectivity) else 0.0,
                )
            )
    return rows


def plot_growth(view: GrowthView, path: Path | str) -> None:
    """Save one plot: by layer, the share of each age in the tokens and in the work, how selective
    its tokens are, and how many are dead."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    layers = list(dict.fromkeys(row.layer for row in view))
    figure = Figure(figsize=(10, 1.6 + 0.24 * len(layers)), layout="constrained")
    panels: Any = figure.subplots(1, 4, sharey=True)
    titles = ("share of the tokens", "share of the work", "selectivity", "dead tokens")
    places = {layer: -place for place, layer in enumerate(layers)}
    shades = colormaps["viridis"]
    newest = max(1, *view.ages)
    for age in view.ages:
        rows = [row for row in view if row.age == age]
        color = shades(0.15 + 0.65 * age / newest)
        label = "old" if age == 0 else f"growth {age}"
        for panel, name in zip(panels[:2], ("share", "work"), strict=True):
            stack(panel, view, rows, name, places, color, label)
        y = [places[row.layer] for row in rows]
        panels[2].plot([row.selectivity for row in rows], y, "o", color=color, label=label)
        panels[3].plot([row.dead / row.tokens for row in rows], y, "o", color=color)
    for panel, title in zip(panels, titles, strict=True):
        panel.set(xlim=(0, 1), title=title)
        panel.grid(axis="x", alpha=0.3)
    panels[0].set_yticks(list(places.values()), layers, fontsize=8)
    panels[2].legend(fontsize=8)
    figure.savefig(path, dpi=150)


def stack(
    panel: Any,
    view: GrowthView,
    rows: Sequence[Generation],
    name: str,
    places: dict[str, int],
    color: Any,
    label: str,
) -> None:
    """Draw the bars of one age after those of the earlier ages."""
    before = [
        sum(getattr(e, name) for e in view if e.layer == row.layer and e.age < row.age)
        for row in rows
    ]
    widths = [getattr(row, name) for row in rows]
    y = [places[row.layer] for row in rows]
    panel.barh(y, widths, left=before, color=color, label=label, height=0.75)
