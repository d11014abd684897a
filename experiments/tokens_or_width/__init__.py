"""Tokens or width: TokenFormers of equal parameters, from narrow with many tokens to wide with few.

A token is a key and a value of the model's width, so parameters are about width times tokens. The
narrowest model has nine times as many tokens per projection as channels, like a model that has
grown by tokens alone (the paper's 1.4B: 8,620 tokens at width 768).
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from experiments.exhibit import Arms, Exhibit, Findings, Plot, Scale, Table
from experiments.job import Job, Results
from experiments.language import LanguageRun, Model
from experiments.plots import BASELINE, COLOURS, OURS, label, new_figure, save
from experiments.sweep import Arm, tune

HEAD = 16
STEPS = 450
SHAPES = {32: 283, 64: 137, 96: 89, 160: 50, 320: 21}
"""Tokens of each attention projection by width: 0.30M parameters each."""
RATES = {"tokenformer": (4e-3, 8e-3, 1.6e-2), "transformer": (2e-3, 4e-3, 8e-3)}
PAPER_TOKENS = {124: 576, 354: 2140, 757: 4850, 1400: 8620}
"""Tokens of the paper's grown models by millions of parameters, all of width 768."""
PAPER_WIDTH = 768


def shape(width: int, family: str = "tokenformer") -> Model:
    return Model(family, SHAPES[width], width=width, heads=width // HEAD)


MODELS = {f"width {width}": shape(width) for width in SHAPES}
TRANSFORMER = "Transformer"
ARMS = MODELS | {TRANSFORMER: shape(96, "transformer")}


def arms(scale: Scale, results: Results) -> dict[str, Arm]:
    return {name: tune_model(model, scale, results) for name, model in ARMS.items()}


def tune_model(model: Model, scale: Scale, results: Results) -> Arm:
    def run_at(rate: float) -> LanguageRun:
        run = LanguageRun(model, (STEPS,), rate=rate, rate_law=model.rate_law)
        fitted: LanguageRun = scale.fit(run)
        return fitted

    return tune(run_at, RATES[model.family], scale, results)


def plan(scale: Scale, results: Results) -> Sequence[Job]:
    if scale.name == "paper":
        return paper_plan()
    return [job for arm in arms(scale, results).values() for job in arm.jobs]


def costs(scale: Scale, results: Results) -> Arms:
    return {name: arm.runs[:1] for name, arm in arms(scale, results).items()}


def paper_plan() -> list[Job]:
    """The 124M model of the paper, and a narrower and a wider one of equal parameters."""
    from experiments.cluster import RecipeRun

    runs: list[Job] = [RecipeRun("openwebtext/tokenformer-124m")]
    for width, heads, tokens in ((512, 8, 994), (1024, 16, 366)):
        options = {
            "hidden_size": width,
            "num_attention_heads": heads,
            "qkv_tokens": tokens,
            "output_tokens": tokens,
            "ffn_tokens": 4 * tokens,
        }
        overrides = tuple((f"model.options.{name}", value) for name, value in options.items())
        runs.append(RecipeRun("openwebtext/tokenformer-124m", overrides, f"width-{width}"))
    return runs


def per_channel(model: Model) -> float:
    """Tokens of an attention projection per channel."""
    assert model.tokens is not None
    return model.tokens / model.width


def describe_tokens(model: Model) -> str:
    if model.family == "transformer":
        return ""
    assert model.tokens is not None
    return f"{model.tokens} and {4 * model.tokens}"


def table(found: dict[str, Arm], results: Results) -> Table:
    header = ["model", "attention and feed-forward tokens", "tokens per channel", "parameters"]
    header += ["KV cache per position", "learning rate", "held-out bits per byte"]
    rows = []
    for name, arm in found.items():
        model = ARMS[name]
        config, run = model.config(), arm.runs[0]
        ratio = "" if name == TRANSFORMER else f"{per_channel(model):.2g}"
        title = f"{name} of width {config.hidden_size}" if name == TRANSFORMER else name
        cache = f"{2 * config.num_hidden_layers * config.hidden_size} numbers"
        cells = [title, describe_tokens(model), ratio, f"{model.parameters:,}", cache]
        rows.append([*cells, f"{run.rate:g}", arm.summary(results).format()])
    return Table([header, *rows])


def close_to_best(found: dict[str, Arm], results: Results) -> list[str]:
    """The widths whose seeds overlap with those of the best one."""
    summaries = {name: found[name].summary(results) for name in MODELS}
    best = min(summaries.values(), key=lambda summary: summary.mean)
    return [name for name, summary in summaries.items() if not summary.above(best)]


def report(scale: Scale, results: Results) -> Findings:
    found = arms(scale, results)
    means = {name: arm.summary(results).mean for name, arm in found.items()}
    best = min(MODELS, key=lambda name: means[name])
    narrow, wide = (f"width {pick(SHAPES)}" for pick in (min, max))
    good = close_to_best(found, results)
    argument = (
        f"At equal parameters and equal training tokens {best} with {MODELS[best].tokens} tokens "
        f"per attention projection is best at {means[best]:.3f} bits per byte; the narrowest model "
        f"with the most tokens ends at {means[narrow]:.3f}, the widest with the fewest at "
        f"{means[wide]:.3f}, the Transformer at {means[TRANSFORMER]:.3f}. "
        f"{good_range(good)} within the seeds of the best."
    )
    return Findings(
        verdict="beyond the paper",
        argument=argument,
        headline=f"best at {per_channel(MODELS[best]):.2g} tokens per channel; "
        f"{narrow} {means[narrow] - means[best]:+.3f}, {wide} {means[wide] - means[best]:+.3f} "
        "bits per byte",
        tables=[table(found, results)],
        plots=[
            Plot(
                "tokens-or-width.png",
                "Loss of models of equal parameters over tokens per channel, and their sweeps of "
                "learning rates",
                partial(draw, found, results),
            )
        ],
        notes=[advice(means, best, good), EQUAL_FLOPS],
    )


def good_range(good: list[str]) -> str:
    ratios = sorted(per_channel(MODELS[name]) for name in good)
    *others, last = (f"{ratio:.2g}" for ratio in ratios)
    if not others:
        return f"No shape but this one, {last} tokens per channel, is"
    return f"Shapes of {', '.join(others)} and {last} tokens per channel are"


EQUAL_FLOPS = (
    "All models have the same number of weights, so their FLOPs differ only by attention between "
    "positions."
)


def advice(means: dict[str, float], best: str, good: list[str]) -> str:
    """What the figures mean for the choice of tokens and width."""
    first, last = (PAPER_TOKENS[size] / PAPER_WIDTH for size in (124, 1400))
    narrow, wide = (f"width {pick(SHAPES)}" for pick in (min, max))
    size = "choose the width so that your parameters make about " + (
        f"{per_channel(MODELS[best]):.2g} tokens per channel in the attention projections"
    )
    if best in (narrow, wide):
        end = "narrowest" if best == narrow else "widest"
        size += f", or go further: the best shape here is the {end}"
    growth = f"costs {means[narrow] - means[best]:.3f} bits per byte against the best shape"
    growth += ": start with more width than the small model needs, or widen it as well"
    if narrow in good:
        growth = "is within the seeds of the best shape"
    return "\n".join(
        [
            f"- **A model of fixed size**: {size}. The paper's 124M has {first:.2g}, its Pile "
            "models 1.",
            "- **A model that grows by tokens** keeps its width, so its tokens per channel grow: "
            f"the paper's from {first:.2g} at 124M to {last:.2g} at 1.4B. A model with "
            f"{per_channel(MODELS[narrow]):.2g} here {growth}.",
            "- **Long contexts**: the KV cache and attention between positions grow with the "
            "width alone. Of two shapes with the same loss take the narrower one.",
        ]
    )


def draw(found: dict[str, Arm], results: Results, path: Path) -> None:
    figure, (left, right) = new_figure(10, 4.2, columns=2)
    ratios = [per_channel(model) for model in MODELS.values()]
    values = [found[name].summary(results).values for name in MODELS]
    for ratio, losses in zip(ratios, values, strict=True):
        left.plot([ratio] * len(losses), losses, "o", color=OURS, alpha=0.4, markersize=5)
    left.plot(ratios, [sum(v) / len(v) for v in values], "-", color=OURS, label="TokenFormer")
    baseline = found[TRANSFORMER].summary(results)
    left.axhline(baseline.mean, linestyle="--", color=BASELINE, label=TRANSFORMER)
    low, high = baseline.mean - baseline.spread, baseline.mean + baseline.spread
    left.axhspan(low, high, color=BASELINE, alpha=0.12, linewidth=0)
    left.set_xscale("log")
    shapes = [f"{per_channel(m):.2g}\n{m.tokens} x {m.width}" for m in MODELS.values()]
    left.set_xticks(ratios, shapes)
    left.minorticks_off()
    label(left, "attention tokens per channel, and tokens x width", "held-out bits per byte")
    left.legend(frameon=False, fontsize=8)
    draw_sweeps(right, found, results)
    save(figure, path)


def draw_sweeps(axes: Any, found: dict[str, Arm], results: Results) -> None:
    for (name, arm), colour in zip(found.items(), COLOURS, strict=True):
        points = [(run.rate, results[run]["bits_per_byte"]) for run in arm.sweep]
        style = "s--" if name == TRANSFORMER else "o-"
        axes.plot(*zip(*points, strict=True), style, color=colour, label=name, markersize=4)
    axes.set_xscale("log")
    rates = sorted({run.rate for arm in found.values() for run in arm.sweep})
    axes.set_xticks(rates, [f"{1e3 * rate:g}e-3" for rate in rates])
    axes.minorticks_off()
    label(axes, "learning rate, seed 0", "held-out bits per byte")
    axes.legend(frameon=False, fontsize=8)


EXHIBIT = Exhibit(
    title="Tokens or width",
    source="asked by users",
    claim="A user of the released code "
    "[asks](https://github.com/Haiyang-W/TokenFormer/issues/20): at a fixed number of parameters, "
    "are more tokens better, or larger ones? The paper fixes one token per channel, or grows the "
    "tokens at a fixed width.",
    setting=f"Byte-level models on enwik8, two layers, heads of {HEAD} channels, 0.30M parameters "
    f"within 1 %; widths {', '.join(map(str, SHAPES))} with the tokens that fit, and the "
    f"Transformer of equal parameters. All train on the same {STEPS} batches of 2,048 bytes. "
    "Learning rates: the best of three per shape, TokenFormers under the rate law; a sweep whose "
    "best is at its end goes on.",
    plan=plan,
    report=report,
    arms=costs,
)
