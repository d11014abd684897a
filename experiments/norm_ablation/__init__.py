"""The ablation of the norms: with weight and bias, with bias, with no parameters."""

from functools import partial

from experiments.ablation import SETTING, SETTINGS, Ablation, AblationResults
from experiments.exhibit import Exhibit, Findings, Plot, Scale, Verdict
from experiments.job import Results

FULL, BIAS, NONE = "weight_bias", "bias", "none"
ABLATION = Ablation(
    "norm_parameters", {FULL: "weight and bias", BIAS: "bias", NONE: "no parameters"}
)
PAPER = {FULL: 82.6, BIAS: 82.5, NONE: 82.5}
"""Top-1 of TokenFormer-B/16 on ImageNet-1K, the paper's ablation of layer normalization."""
TOLERANCE = (PAPER[FULL] - PAPER[NONE]) / (100 - PAPER[FULL])
"""What the paper calls comparable: so many more errors without the parameters."""


def cost(found: AblationResults, setting: str) -> float:
    """Return how many more errors, or bits, there are without the parameters, as a share."""
    return found.errors(setting, NONE) / found.errors(setting, FULL) - 1


def is_comparable(found: AblationResults, setting: str) -> bool:
    return not found.better(setting, FULL, NONE) or cost(found, setting) <= TOLERANCE


def verdict_of(found: AblationResults) -> Verdict:
    kept = [is_comparable(found, setting) for setting in SETTINGS]
    if all(kept):
        return "holds"
    return "not at this scale" if any(kept) else "does not hold"


def report(scale: Scale, results: Results) -> Findings:
    found = ABLATION.found(scale, results)
    images, text = (
        [found.format(setting, value) for value in (FULL, BIAS, NONE)] for setting in SETTINGS
    )
    costs = [f"{100 * cost(found, setting):+.1f} %" for setting in SETTINGS]
    argument = (
        f"Norms with weight and bias, with bias and with neither reach {images[0]}, {images[1]} "
        f"and {images[2]} % on Fashion-MNIST and {text[0]}, {text[1]} and {text[2]} bits per byte "
        f"on enwik8 (paper: {PAPER[FULL]}, {PAPER[BIAS]} and {PAPER[NONE]} %). Removing both "
        f"changes the errors by {costs[0]} and the bits by {costs[1]} (paper: errors "
        f"{100 * TOLERANCE:+.1f} %)."
    )
    return Findings(
        verdict=verdict_of(found),
        argument=argument,
        headline=f"without norm parameters: errors {costs[0]}, bits per byte {costs[1]} (paper: "
        f"errors {100 * TOLERANCE:+.1f} %)",
        tables=[found.table(PAPER)],
        plots=[
            Plot(
                "norm-ablation.png",
                "Accuracy on Fashion-MNIST and bits per byte on enwik8 by the parameters of norms",
                partial(found.draw, NONE),
            )
        ],
        notes=[
            "The claim holds if the seeds with and without weight and bias overlap, or if removing "
            f"both costs no more than in the paper, {100 * TOLERANCE:.1f} % of the errors or bits. "
            "The final norm keeps its weight and bias in all rows."
        ],
    )


EXHIBIT = Exhibit(
    title="Ablation of norm parameters",
    source="Table 5",
    claim="Layer norms without weight and bias, which growth and merging need, classify as well.",
    setting=SETTING,
    plan=ABLATION.plan,
    report=report,
    arms=ABLATION.costs,
)
