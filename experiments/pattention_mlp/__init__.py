"""Pattention as the MLP of a Transformer: a public negative result, rerun in small.

In a pull request to openai/parameter-golf a 17M Transformer whose MLP was replaced by Pattention
ended far above the MLP. This exhibit compares the two at equal parameters and tuned learning rates,
and takes the layer of the pull request apart.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from experiments.exhibit import Arms, Exhibit, Findings, Plot, Scale, Table
from experiments.job import Job, Results
from experiments.language import LanguageRun, Model
from experiments.pattention_mlp.feed_forward import FeedForwardRun
from experiments.pattention_mlp.untrained_keys import UntrainedKeys
from experiments.plots import draw_dots
from experiments.sweep import Arm, tune

STEPS = 900
TRANSFORMER = Model("transformer", None, width=64, layers=3)
TOKENFORMER = replace(TRANSFORMER, family="tokenformer", tokens=48)
"""48 tokens per attention projection, 192 per feed-forward layer: exactly as many parameters."""
RATES = (2e-3, 4e-3, 8e-3)
TOKENFORMER_RATES = (4e-3, 8e-3, 1.6e-2)
SAME_RATE = "Pattention at the MLP's learning rate"
NO_LAYER = "no feed-forward layer"
FFNS = {
    "MLP": ("mlp", "none"),
    "MLP under the rate law": ("mlp_law", "none"),
    "Pattention": ("pattention", "none"),
    "Pattention under the rate law": ("pattention", "tokens"),
    "the pull request's layer": ("pair_zero", "none"),
    "the same, random initial values": ("pair_random", "none"),
    "the same, random initial values and the paper's theta": ("pair_l2_gelu", "none"),
}
"""The feed-forward layer of every arm with linear attention projections, and its rate law."""
MLP, MLP_LAW, PATTENTION, LAW, PAIR_ZERO, PAIR_RANDOM, PAIR_L2 = FFNS
WHOLE = "whole TokenFormer"
OURS = (SAME_RATE, PATTENTION, LAW, WHOLE)
ONE_SEED = (MLP_LAW, PAIR_ZERO, PAIR_RANDOM, PAIR_L2)

PULL_REQUEST = "https://github.com/openai/parameter-golf/pull/2029"
PUBLISHED = {"mlp": 1.2305, "pattention": 1.3771, "pattention, 26.5M": 1.3746}
"""Bits per byte in the pull request."""
PUBLISHED_BYTES = 9_528_962
"""Its compressed model with Pattention."""
PUBLISHED_TOKENS = 9 * 2 * 341 * (512 + 1024)
"""Numbers in the keys and values of its nine layers."""
PUBLISHED_PARAMETERS = 17_050_696
MLP_COMPRESSION = 17.22 / 15.81
"""By zlib, of the int8 weights of its model with MLP."""


def language_run(model: Model, rate: float, law: str) -> LanguageRun:
    return LanguageRun(model, (STEPS,), rate=rate, rate_law=law)


def arms(scale: Scale, results: Results) -> dict[str, Arm]:
    """All arms, in the order of the table. Diagnostic ones have one seed."""
    found = {name: tune_ffn(name, scale, results) for name in FFNS}
    found[SAME_RATE] = follow(MLP, "pattention", found)
    found[NO_LAYER] = follow(PAIR_ZERO, "none", found)
    found[WHOLE] = tune(
        lambda rate: scale.fit(language_run(TOKENFORMER, rate, "tokens")),
        TOKENFORMER_RATES,
        scale,
        results,
    )
    order = (MLP, MLP_LAW, SAME_RATE, PATTENTION, LAW, WHOLE)
    return {name: found[name] for name in (*order, NO_LAYER, PAIR_ZERO, PAIR_RANDOM, PAIR_L2)}


def tune_ffn(name: str, scale: Scale, results: Results) -> Arm:
    ffn, law = FFNS[name]
    arm = tune(
        lambda rate: scale.fit(FeedForwardRun(language_run(TRANSFORMER, rate, law), ffn)),
        RATES,
        scale,
        results,
    )
    return Arm(arm.sweep, arm.runs[:1]) if name in ONE_SEED else arm


def follow(name: str, ffn: str, found: dict[str, Arm]) -> Arm:
    """An arm with another feed-forward layer, at the learning rate and seeds of arm `name`."""
    return Arm([], [replace(run, ffn=ffn) for run in found[name].runs])


def plan(scale: Scale, results: Results) -> list[Job]:
    if scale.name == "paper":
        return []
    jobs = [job for arm in arms(scale, results).values() for job in arm.jobs]
    return [*jobs, UntrainedKeys()]


def costs(scale: Scale, results: Results) -> Arms:
    return {name: arm.runs[:1] for name, arm in arms(scale, results).items()}


def table(found: dict[str, Arm], results: Results) -> Table:
    header = ["feed-forward layer", "learning rate", "held-out bits per byte", "parameters"]
    header += ["share of the output that depends on the input"]
    rows = []
    for name, arm in found.items():
        run, result = arm.runs[0], results[arm.runs[0]]
        depends = "" if name in (WHOLE, NO_LAYER) else f"{result['ffn_variation']:.1%}"
        cells = [name, f"{run.rate:g}", arm.summary(results).format()]
        rows.append([*cells, f"{result['parameters']:,}", depends])
    return Table([header, *rows])


def report(scale: Scale, results: Results) -> Findings:
    found = arms(scale, results)
    end = {name: arm.summary(results).mean for name, arm in found.items()}
    gap = end[LAW] - end[MLP]
    argument = (
        f"In place of the MLP alone, {LAW} ends at {end[LAW]:.3f} bits per byte against "
        f"{end[MLP]:.3f} of the MLP, a difference of {gap:+.3f} where the pull request has "
        f"{PUBLISHED['pattention'] - PUBLISHED['mlp']:+.3f}; a whole TokenFormer ends at "
        f"{end[WHOLE]:.3f}. The pull request's own layer ends at {end[PAIR_ZERO]:.3f}, no layer at "
        f"all at {end[NO_LAYER]:.3f}: its zero initial values let no gradient through, so its "
        "model has no feed-forward layers but one constant vector each."
    )
    return Findings(
        verdict="beyond the paper",
        argument=argument,
        headline=f"Pattention as the MLP {gap:+.3f} bits per byte (public negative result: "
        f"{PUBLISHED['pattention'] - PUBLISHED['mlp']:+.3f}, with a layer that cannot train)",
        tables=[table(found, results)],
        plots=[
            Plot(
                "pattention-mlp.png",
                "Final loss of every feed-forward layer, one dot per seed",
                partial(draw, found, results),
            )
        ],
        notes=[*pull_request(end, results), *causes(end)],
    )


def pull_request(end: dict[str, float], results: Results) -> list[str]:
    """What the pull request did, and what its own figures say about it."""
    keys = PUBLISHED_TOKENS / 2 * results[UntrainedKeys()]["bytes_per_weight"]
    rest = (PUBLISHED_PARAMETERS - PUBLISHED_TOKENS) / MLP_COMPRESSION
    return [
        f"What [pull request 2029]({PULL_REQUEST}) does right: equal parameters, a control run on "
        "the same machine, public code and logs. What differs from the paper:",
        "- **It replaces each of the two matrices by a layer of tokens**, with a squared ReLU "
        "between them; the paper replaces the whole MLP by one layer.\n"
        "- **Its theta is a plain softmax over scores divided by sqrt(d)**, whose weights sum to "
        "1, the first row of the paper's ablation without its scale; the output is a mean of the "
        "values.\n"
        "- **All values start at zero.** Then the first layer's output is zero, where the squared "
        "ReLU has no slope: keys and values of the first layer and keys of the second get a "
        "gradient of exactly zero, with any optimizer and at any learning rate. What remains of "
        "the layer is one constant vector.\n"
        "- Its Muon optimizer and learning rate are those of the matrices; that no longer matters.",
        "Its published figures agree. A model with twice the hidden width "
        f"(26.5M parameters) ended at {PUBLISHED['pattention, 26.5M']}, like the one with 17M "
        f"({PUBLISHED['pattention']}). The compressed model is "
        f"{PUBLISHED_BYTES / 1e6:.2f} MB; keys at their initial values, values that compress to "
        "nothing, and the other weights compressed as those of its MLP model come to "
        f"{(keys + rest) / 1e6:.2f} MB.",
        f"With random instead of zero values the layer ends at {end[PAIR_RANDOM]:.3f}, with the "
        f"paper's theta too at {end[PAIR_L2]:.3f}, against {end[NO_LAYER]:.3f} without a layer.",
    ]


def causes(end: dict[str, float]) -> list[str]:
    """The other candidates for a difference, with what each is worth."""
    return [
        f"- **Learning rate.** At the best rate of the MLP, Pattention ends "
        f"{end[SAME_RATE] - end[MLP]:+.3f} from the MLP, at its own best single rate "
        f"{end[PATTENTION] - end[MLP]:+.3f}, under the rate law {end[LAW] - end[MLP]:+.3f}.\n"
        f"- **The rate law alone.** The MLP with the law's factors, as if its hidden units were "
        f"tokens, ends {end[MLP_LAW] - end[MLP]:+.3f} from the MLP with one rate.\n"
        "- **The norm of the input.** Pattention depends on the direction of its input alone. "
        "Here that loses nothing: the norm before it has no parameters, so all inputs have the "
        "same length. Initial keys and values have the standard deviations of the MLP's matrices; "
        "the two layers differ in one factor per position, the norm of the scores.",
    ]


def draw(found: dict[str, Arm], results: Results, path: Path) -> None:
    values: dict[str, Sequence[float]] = {
        name: arm.summary(results).values for name, arm in found.items()
    }
    draw_dots(values, path, "held-out bits per byte", OURS)


EXHIBIT = Exhibit(
    title="Pattention as the MLP alone",
    source="a public negative result",
    claim=f"A 17M Transformer whose MLP is replaced by Pattention ends at "
    f"{PUBLISHED['pattention']} bits per byte against {PUBLISHED['mlp']} with the MLP "
    f"([openai/parameter-golf, pull request 2029]({PULL_REQUEST})). The paper replaces all "
    "projections and does not test this one.",
    setting="Byte-level Transformers on enwik8, three layers of width 64, 0.16M parameters, with "
    "linear attention projections; the feed-forward layers have equal parameters, within half a "
    f"percent. {STEPS} steps of 2,048 bytes, AdamW. Learning rates: the best of three; a sweep "
    "whose best is at its end goes on. Two arms have no sweep: Pattention at the MLP's rate, and "
    "no layer, at the rate of the pull request's layer. Three seeds, one for arms without ±; all "
    "arms see the same batches.",
    plan=plan,
    report=report,
    arms=costs,
)
