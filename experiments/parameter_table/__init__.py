"""Parameters and FLOPs: the paper's formulas and sizes against our accounting and built models."""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from experiments.exhibit import Exhibit, Findings, Plot, Scale, Table, Verdict
from experiments.job import Job, Result, Results
from experiments.parameter_table.formulas import ROWS, TOTAL, Difference, differences
from experiments.parameter_table.published_sizes import (
    PRINTED,
    PrintedSize,
    best_ffn_tokens,
    models,
    parameters,
)
from experiments.plots import BASELINE, ORANGE, label, new_figure, save
from experiments.workspace import Workspace

PARTS = ("embedding", "positions", "qkv", "output", "ffn", "norms", "head")
FLOPS_PARTS = ("embedding", "qkv", "token_token", "output", "ffn", "head")
TITLES = {
    "qkv": "QKV",
    "token_token": "token-token",
    "ffn": "feed-forward",
    "head": "head (de-embed)",
}
TOKEN_TOKEN = {"124m": 3.6, "354m": 6.8, "757m": 10.1}
"""Token-token FLOPs of the Transformers in units of 1e4 T²: the paper's Table 8."""


@dataclass(frozen=True)
class BuiltParameters(Job):
    """Parameters of every published size as built, on the meta device."""

    def run(self, workspace: Workspace) -> Result:
        from tokenformer.models.model_classes import build_on_meta

        start = time.perf_counter()
        found = {name: build_on_meta(config).num_parameters() for name, config in models().items()}
        return {"parameters": found, "seconds": round(time.perf_counter() - start, 1)}


def plan(scale: Scale, results: Results) -> list[Job]:
    return [BuiltParameters()]


def text_models() -> dict[str, Any]:
    return {name: config for name, config in models().items() if hasattr(config, "vocab_size")}


def wrong_formulas() -> list[Difference]:
    return [
        difference
        for name, config in text_models().items()
        for difference in differences(name, config, config.max_position_embeddings)
    ]


def wrong_sizes() -> list[PrintedSize]:
    """Return the sizes whose printed number is not that of the model, rounded as printed."""
    return [size for size in PRINTED if not size.rounds_to_printed(parameters(size.config()))]


def misprints() -> list[PrintedSize]:
    """Return the sizes whose printed shape is not that of the preset, which fits the number."""
    return [
        size for size in PRINTED if parameters(size.printed_config()) != parameters(size.config())
    ]


def formula_table() -> Table:
    header = [
        "operation",
        *(
            f"{what}, {family}"
            for what in ("parameters", "FLOPs")
            for family in ("Transformer", "TokenFormer")
        ),
        "agrees with accounting",
    ]
    wrong = {difference.operation for difference in wrong_formulas()}
    rows = []
    for row in ROWS:
        cells = [row.transformer, row.tokenformer, row.transformer_flops, row.tokenformer_flops]
        shown = ["-" if cell is None else cell[0] for cell in cells]
        rows.append([row.operation, *shown, "**no**" if row.operation in wrong else "yes"])
    totals = [TOTAL[family][place] for place in (0, 1) for family in ("transformer", "tokenformer")]
    rows.append(["total without embedding", *totals, "**no**" if "total" in wrong else "yes"])
    return Table([header, *rows], "The paper's formulas, evaluated for every language model.")


def parameter_table(results: Results) -> Table:
    from tokenformer.models.accounting import count_parameters

    built = results[BuiltParameters()]["parameters"]
    header = ["model", *(TITLES.get(part, part) for part in PARTS), "total", "built", "printed"]
    printed = {size.name: size for size in PRINTED}
    rows = []
    for name, config in models().items():
        counts = count_parameters(config)
        total, size = sum(counts.values()), printed.get(name)
        shown = "" if size is None else size.printed
        if size is not None and not size.rounds_to_printed(total):
            shown = f"**{size.printed}** ({relative(size):+.1%})"
        same = "equal" if built[name] == total else f"**{built[name]:,}**"
        rows.append([name, *(f"{counts[part]:,}" for part in PARTS), f"{total:,}", same, shown])
    caption = "Parameters; in brackets the model against the number that the paper prints."
    return Table([header, *rows], caption)


def flops_table() -> Table:
    from tokenformer.models.accounting import forward_flops, image_forward_flops

    names = [TITLES.get(part, part) for part in FLOPS_PARTS]
    rows = [["model", "T", *names, "total"]]
    for name, config in models().items():
        if hasattr(config, "vocab_size"):
            length = config.max_position_embeddings
            flops = forward_flops(config, length)
        else:
            length, flops = config.num_positions, image_forward_flops(config)
        cells = [f"{flops[part]:.3g}" if part in flops else "-" for part in FLOPS_PARTS]
        rows.append([name, f"{length:,}", *cells, f"{sum(flops.values()):.3g}"])
    return Table(rows, "Forward FLOPs of one sequence of T tokens, or of one image.")


def relative(size: PrintedSize) -> float:
    """Return by how much the model is larger than printed."""
    return parameters(size.config()) / size.printed_parameters - 1


def notes() -> list[str]:
    """Return what the paper's tables say otherwise, each found above."""
    found = [
        f"{size.name}: {parameters(size.config()) / 1e6:,.1f}M parameters where the paper "
        f"prints {size.printed}, {relative(size):+.1%}."
        for size in wrong_sizes()
    ]
    found += [
        f"{size.name}: with the {size.ffn_tokens:,} feed-forward pairs that are printed it "
        f"would have {parameters(size.printed_config()) / 1e6:.0f}M parameters; "
        f"{best_ffn_tokens(size):,} come closest to the printed {size.printed}, with "
        f"{parameters(size.config()) / 1e6:.1f}M, so that is a typo."
        for size in misprints()
    ]
    heads = [d for d in wrong_formulas() if d.operation == "de-embed"]
    if heads and all(
        d.ours == d.paper * text_models()[d.model].max_position_embeddings for d in heads
    ):
        found.append(
            "The de-embed row, 2 V d, lacks the factor T: the head runs on every token. Its share "
            f"of the forward pass of {heads[0].model} is {head_share(heads[0].model):.0%}."
        )
    found.append(
        'The column "Training FLOPs" is the forward pass; with the backward pass it is three '
        "times as much."
    )
    found += [*token_token_notes(), *matched_notes()]
    return [
        "Where the paper's tables differ from the models:\n\n" + "\n".join(f"- {n}" for n in found)
    ]


def head_share(name: str) -> float:
    from tokenformer.models.accounting import forward_flops

    config = text_models()[name]
    flops = forward_flops(config, config.max_position_embeddings)
    return flops["head"] / sum(flops.values())


def token_token_notes() -> list[str]:
    """Compare the printed token-token FLOPs with 4 L d of the Transformers."""
    found = []
    for preset, printed in TOKEN_TOKEN.items():
        config = models()[f"Transformer {preset.upper()}"]
        computed = 4 * config.num_hidden_layers * config.hidden_size / 1e4
        if round(computed, 1) != printed:
            found.append(
                f"Table 8 prints {printed} for the token-token FLOPs of Transformer "
                f"{preset.upper()} in units of 1e4 T²; 4 L d is {computed:.2f}."
            )
    return found


def matched_notes() -> list[str]:
    """Compare the sizes that the paper matched to a Vision Transformer with it."""
    found = []
    for size in (size for size in PRINTED if size.preset.endswith("-match")):
        twin = f"Vision Transformer {size.preset.removesuffix('-match').capitalize()}"
        difference = parameters(size.config()) - parameters(models()[twin])
        word = "exactly as many" if difference == 0 else f"{difference:+,}"
        found.append(f"{size.name} has {word} parameters as {twin}, which it was matched to.")
    return found


def verdict_of(wrong: list[Difference], built_equal: bool) -> Verdict:
    """The formulas hold if only the de-embed row differs, and built models have what they say."""
    only_head = {difference.operation for difference in wrong} <= {"de-embed"}
    return "holds" if only_head and built_equal else "does not hold"


def report(scale: Scale, results: Results) -> Findings:
    built = results[BuiltParameters()]["parameters"]
    equal = built == {name: parameters(config) for name, config in models().items()}
    wrong, sizes = wrong_formulas(), wrong_sizes()
    rows = sorted({difference.operation for difference in wrong})
    worst = max(sizes, key=lambda size: abs(relative(size)))
    argument = (
        f"The {len(ROWS)} rows and the total, except {', '.join(rows) or 'none'}, equal our "
        f"accounting for {len(text_models())} language models, and all {len(built)} published "
        f"sizes as built {'have exactly' if equal else 'do not have'} the parameters of the "
        f"formulas. Of the {len(PRINTED)} sizes that the paper prints, {len(sizes)} do not round "
        f"to the model's number; the largest difference is {worst.printed} for "
        f"{parameters(worst.config()) / 1e6:,.1f}M."
    )
    return Findings(
        verdict=verdict_of(wrong, equal),
        argument=argument,
        headline=f"{len(built)} models exact; {len(sizes)} of {len(PRINTED)} printed sizes differ",
        tables=[formula_table(), parameter_table(results), flops_table()],
        plots=[
            Plot(
                "parameter-table.png",
                "Parameters of the published sizes against the numbers in the paper",
                partial(draw),
            )
        ],
        notes=notes(),
    )


def draw(path: Path) -> None:
    wrong = wrong_sizes()
    figure, (axes,) = new_figure(8, 4)
    for place, size in enumerate(PRINTED):
        colour = ORANGE if size in wrong else BASELINE
        axes.plot([0, 100 * relative(size)], [place, place], color=colour)
        axes.plot(100 * relative(size), place, "o", color=colour)
    names = [f"{size.name}, {size.printed}" if size.images else size.name for size in PRINTED]
    axes.set_yticks(range(len(PRINTED)), names)
    axes.axvline(0, color="0.7", linewidth=1)
    axes.invert_yaxis()
    axes.tick_params(length=0)
    title = "orange: the model's number does not round to the printed one"
    label(axes, "parameters of the model, % above the printed number", "", title)
    save(figure, path)


EXHIBIT = Exhibit(
    title="Parameters and FLOPs",
    source="Tables 3 and 9",
    claim="Parameters and FLOPs of a TokenFormer follow from its tokens as those of a Transformer "
    "from its width; the token-token FLOPs depend on the width alone.",
    setting="Formulas of `tokenformer.models.accounting` and of the paper for every published size "
    "and Transformer, against the models built on the meta device. Computed, the same at every "
    "scale.",
    plan=plan,
    report=report,
)
