"""The gradient of Pattention: does softmax push its derivatives towards zero? (Appendix A)

Two language models that differ in theta alone, each at its best learning rate. At six steps of the
training the derivatives of the weights by the scores are computed on held-out text, in closed form,
with the gradients of the loss by scores and keys.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean, median

from experiments.ablation import STEPS, tune_text
from experiments.exhibit import Exhibit, Findings, Plot, Scale, Table, Verdict
from experiments.gradients.gradient_run import KINDS, QUANTILES, VANISHED, GradientRun
from experiments.job import Job, Result, Results, summarize
from experiments.language import Model
from experiments.plots import ORANGE, OURS, label, new_figure, save

SOFTMAX, L2 = "softmax", "l2_gelu"
THETAS = {SOFTMAX: "exp + L1", L2: "GELU + L2"}
TITLES = {
    "diagonal": "dS_i/dA_i",
    "off_diagonal": "dS_i/dA_j",
    "score_gradients": "dLoss/dA",
    "key_gradients": "dLoss/dK",
}
MATERIAL = 0.01
"""A share of the derivatives that counts."""
MIDDLE = QUANTILES.index(0.5)
SMALLEST = 1e-15
"""Drawn instead of zero, on logarithmic axes."""


def runs(theta: str, scale: Scale, results: Results) -> tuple[list[Job], list[GradientRun]]:
    """Return the sweep, which the ablation of theta shares, and the recorded runs of all seeds."""
    arm = tune_text(Model(theta=theta), scale, results)
    return arm.sweep, [scale.fit(GradientRun(run)) for run in arm.runs]


def plan(scale: Scale, results: Results) -> list[Job]:
    jobs: list[Job] = []
    for theta in THETAS:
        sweep, recorded = runs(theta, scale, results)
        jobs += [*sweep, *recorded]
    return jobs


class Recorded:
    """What the runs of one theta recorded, over seeds, layers and projections."""

    def __init__(self, theta: str, scale: Scale, results: Results) -> None:
        self.runs = runs(theta, scale, results)[1]
        self.results = results
        rows = [dict(results[run]["recorded"]) for run in self.runs]
        self.steps: list[int] = sorted(set.intersection(*(set(row) for row in rows)))
        self.layers: dict[int, list[list[Result]]] = {
            step: [row[step] for row in rows] for step in self.steps
        }
        """Distributions of all projections, by step and seed."""

    def values(self, step: int, value: Callable[[Result], float]) -> list[float]:
        """Return a figure of every seed: the mean over its projections."""
        return [mean(value(layer) for layer in seed) for seed in self.layers[step]]

    def vanished(self, kind: str, step: int) -> list[float]:
        return self.values(step, lambda layer: layer[kind]["vanished"])

    def quantile(self, kind: str, place: int, step: int) -> float:
        """Return a quantile of the magnitudes of a typical projection: the median over all."""
        return self.typical(step, lambda layer: layer[kind]["quantiles"][place])

    def median(self, kind: str, step: int) -> float:
        return self.quantile(kind, MIDDLE, step)

    def relative_median(self, kind: str, step: int) -> float:
        """Return the median in units of the largest, for a typical projection."""
        return self.typical(
            step, lambda layer: layer[kind]["quantiles"][MIDDLE] / (layer[kind]["largest"] or 1)
        )

    def typical(self, step: int, value: Callable[[Result], float]) -> float:
        return median(value(layer) for seed in self.layers[step] for layer in seed)

    def effective_tokens(self, step: int) -> float:
        return mean(self.values(step, lambda layer: layer["effective_tokens"]))


def training_table(found: dict[str, Recorded]) -> Table:
    header = ["theta", "step", "effective tokens"]
    header += [f"{TITLES[kind]}: median, vanished" for kind in KINDS]
    rows = []
    for theta, recorded in found.items():
        for step in recorded.steps:
            cells = [
                f"{recorded.median(kind, step):.2g}, {mean(recorded.vanished(kind, step)):.1%}"
                for kind in KINDS
            ]
            share = f"{recorded.effective_tokens(step):.0%}"
            rows.append([THETAS[theta], str(step), share, *cells])
    caption = (
        "Magnitudes: their median in a typical projection, and the mean share that has vanished, "
        f"below {VANISHED:g} of the largest of the same projection. Effective tokens: the share of "
        "the tokens that a row weighs, 100 % if all weigh the same."
    )
    return Table([header, *rows], caption)


def projection_table(found: dict[str, Recorded]) -> Table:
    """The end of training by projection."""
    header = ["projection"]
    for kind in KINDS[:2]:
        header += [f"{TITLES[kind]}, {name}: median, vanished" for name in THETAS.values()]
    rows: dict[str, list[str]] = {}
    for kind in KINDS[:2]:
        for recorded in found.values():
            layers = [layer for seed in recorded.layers[recorded.steps[-1]] for layer in seed]
            names = sorted({(layer["layer"], layer["projection"]) for layer in layers})
            for place in names:
                same = [x[kind] for x in layers if (x["layer"], x["projection"]) == place]
                size = mean(x["quantiles"][MIDDLE] for x in same)
                cell = f"{size:.2g}, {mean(x['vanished'] for x in same):.1%}"
                rows.setdefault(f"{place[1]} of layer {place[0]}", []).append(cell)
    last = next(iter(found.values())).steps[-1]
    return Table([header, *([name, *cells] for name, cells in rows.items())], f"Step {last}.")


def verdict_of(found: dict[str, Recorded]) -> Verdict:
    """Softmax pushes derivatives towards zero if at the end a clearly larger share of them has
    vanished than at the start, and than with GELU, in every seed, on and off the diagonal."""
    softmax, l2 = found[SOFTMAX], found[L2]
    first, last = softmax.steps[0], softmax.steps[-1]
    holds = [
        min(softmax.vanished(kind, last))
        > MATERIAL + max(*l2.vanished(kind, last), *softmax.vanished(kind, first))
        for kind in KINDS[:2]
    ]
    if all(holds):
        return "holds"
    return "not at this scale" if any(holds) else "does not hold"


def report(scale: Scale, results: Results) -> Findings:
    found = {theta: Recorded(theta, scale, results) for theta in THETAS}
    softmax, l2 = found[SOFTMAX], found[L2]
    first, last = softmax.steps[0], softmax.steps[-1]

    def shares(kind: str, step: int) -> str:
        return " and ".join(f"{mean(r.vanished(kind, step)):.1%}" for r in (softmax, l2))

    bits = {theta: summarize(recorded.runs, results) for theta, recorded in found.items()}
    argument = (
        f"From step {first} to {last} the share of derivatives dS_i/dA_i below {VANISHED:g} of the "
        f"largest goes from {shares('diagonal', first)} to {shares('diagonal', last)} with softmax "
        f"and GELU + L2, off the diagonal from {shares('off_diagonal', first)} to "
        f"{shares('off_diagonal', last)}, and the median on the diagonal is "
        f"{softmax.relative_median('diagonal', last):.2g} and "
        f"{l2.relative_median('diagonal', last):.2g} of the largest. A row weighs "
        f"{softmax.effective_tokens(last):.0%} and {l2.effective_tokens(last):.0%} of the tokens; "
        f"the gradients of the loss by the scores have medians of "
        f"{softmax.median('score_gradients', last):.1e} and "
        f"{l2.median('score_gradients', last):.1e}, and the models end at "
        f"{bits[SOFTMAX].format()} and {bits[L2].format()} bits per byte."
    )
    return Findings(
        verdict=verdict_of(found),
        argument=argument,
        headline=f"vanished on the diagonal: {shares('diagonal', last)} (softmax, GELU + L2)",
        tables=[training_table(found), projection_table(found)],
        plots=[
            Plot(
                "gradients.png",
                "Derivatives of the weights by the scores and gradients of the loss over training, "
                "for softmax and GELU + L2",
                partial(draw, found),
            )
        ],
        notes=[
            "Derivatives are by the scores A, whose size theta does not fix: with GELU + L2 they "
            "are inverse to the norm of A, while the weights S do not depend on it. Shares of the "
            "largest derivative do not depend on it either. The paper argues from the formulas "
            "and shows no measurement. The claim holds if with softmax, on and off the diagonal, "
            f"at least {MATERIAL:.0%} more of the derivatives have vanished at the end than at "
            "the start and than with GELU + L2, in every seed."
        ],
    )


def draw(found: dict[str, Recorded], path: Path) -> None:
    figure, panels = new_figure(13, 6, rows=2, columns=len(KINDS))
    colours = {SOFTMAX: ORANGE, L2: OURS}
    for place, kind in enumerate(KINDS):
        sizes, shares = panels[place], panels[len(KINDS) + place]
        for theta, recorded in found.items():
            x, colour = range(len(recorded.steps)), colours[theta]
            bands = [
                [max(recorded.quantile(kind, n, s), SMALLEST) for s in recorded.steps]
                for n in range(len(QUANTILES))
            ]
            sizes.fill_between(x, bands[0], bands[4], color=colour, alpha=0.12, linewidth=0)
            sizes.fill_between(x, bands[1], bands[3], color=colour, alpha=0.25, linewidth=0)
            sizes.plot(x, bands[2], "o-", color=colour, markersize=4, label=THETAS[theta])
            means = [100 * mean(recorded.vanished(kind, step)) for step in recorded.steps]
            shares.plot(x, means, "o-", color=colour, markersize=4)
            for seed in range(len(recorded.runs)):
                dots = [100 * recorded.vanished(kind, step)[seed] for step in recorded.steps]
                shares.plot(x, dots, ".", color=colour, alpha=0.4)
        sizes.set_yscale("log")
        steps = next(iter(found.values())).steps
        for axes in (sizes, shares):
            axes.set_xticks(range(len(steps)), steps)
        label(sizes, "", "median, 50 % and 90 % of all" if place == 0 else "", TITLES[kind])
        y = f"% below {VANISHED:g} of the largest" if place == 0 else ""
        label(shares, "training step", y)
    panels[0].legend(frameon=False, fontsize=8)
    save(figure, path)


EXHIBIT = Exhibit(
    title="The gradient of Pattention",
    source="Appendix A",
    claim="Softmax concentrates the weights and drives their derivatives by the scores towards "
    "zero; GELU after the L2 norm keeps them larger.",
    setting="Byte-level models on enwik8, two layers of width 128 with 32 and 128 tokens, "
    f"{STEPS} steps of 2,048 bytes, with softmax and with GELU + L2, each at the best learning "
    "rate of the sweep of the ablation of theta. Derivatives on four held-out sequences in closed "
    "form, for every projection.",
    plan=plan,
    report=report,
)
