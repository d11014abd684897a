"""Progressive scaling: two figures and two tables on what it costs to grow, against Transformers.

The paper's protocol in proportion. Four sizes in the ratio of 124m, 354m, 757m and 1.4b: the first
trains for `FULL` steps, and each later one grows from the one before and trains for a tenth of
that. Transformers of the same sizes train from scratch, for all and for a tenth of the steps.
"""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

from experiments.exhibit import Arms, Exhibit, Findings, Plot, Scale, Table, Verdict
from experiments.job import Job, Results, Summary, summarize
from experiments.language import Growth, LanguageRun, Model
from experiments.plots import BASELINE, GREEN, LIGHT, ORANGE, OURS, label, new_figure, save
from experiments.sweep import Arm, tune

TOKENS = (48, 152, 336, 584)
"""Tokens of the four sizes: parameters in the ratio 1 : 2.9 : 6.1 : 10.6, as in the paper."""
PAPER_SIZES = ("124m", "354m", "757m", "1.4b")
FULL = 4000
"""Steps of a model from scratch; the paper's 300B tokens."""
BATCH = 4
"""Sequences of 128 bytes. Small, so that a tenth is enough steps to learn in."""
TENTH = FULL // 10
BASE = Model(width=64, heads=4)
RATES = {"tokens": (2e-3, 4e-3, 8e-3), "none": (1e-3, 2e-3, 4e-3)}
"""Where the sweeps of learning rates begin, with and without the rate law."""
PERPLEXITY = {
    "Transformer, full": (17.06, 13.02, 11.93, 11.63),
    "Transformer, a tenth": (None, 15.97, 13.78, 13.34),
    "grown, a tenth per stage": (16.41, 14.02, 12.59, 11.77),
}
"""The paper's Tables 6 and 7."""
CUMULATIVE, PER_STAGE = 3, 10
"""The paper's headlines: how many times cheaper growing is in total and at every stage."""


def gap_left(grown: float, full: float, tenth: float) -> float:
    """Return the distance of a grown model from the Transformer with the full budget, as a share of
    what a tenth of the budget costs the Transformer."""
    return (grown - full) / (tenth - full) if tenth > full else math.inf


CLOSE = gap_left(
    *(
        math.log(PERPLEXITY[row][-1])
        for row in ("grown, a tenth per stage", "Transformer, full", "Transformer, a tenth")
    )
)
"""What the paper calls comparable, from its perplexities at 1.4B."""


def tokenformer(size: int) -> Model:
    return replace(BASE, tokens=TOKENS[size])


def transformer(size: int) -> Model:
    return replace(BASE, family="transformer", tokens=TOKENS[size])


def from_scratch(model: Model, steps: int, rate: float) -> LanguageRun:
    return LanguageRun(
        model,
        (steps,),
        batch=BATCH,
        rate=rate,
        rate_law=model.rate_law,
        schedule="cosine",
        floor=0.01,
        validations=4,
    )


WAYS = {
    "random": "grown as in the paper: `random`, a fresh optimizer, one rate",
    "shrink": "grown by `shrink`, rate law",
    "zero": "grown by `zero`, rate law",
    "shrink before decay": "grown by `shrink` before the rate decays, rate law",
    "zero before decay": "grown by `zero` before the rate decays, rate law",
}
"""Ways to grow. By the last two the learning rate is constant up to the last stage, over which it
falls; by the others it falls and starts again in every stage."""
STAGES = {"half a tenth": TENTH // 2, "a tenth": TENTH, "two tenths": 2 * TENTH}
"""Budgets of a stage; the paper's 15B, 30B and 60B tokens."""


def decays_in_every_stage(way: str) -> bool:
    return "before decay" not in way


def chain(way: str, rate: float, stage: int = TENTH) -> LanguageRun:
    """A run that trains the first size and grows to the three others."""
    paper, every_stage = way == "random", decays_in_every_stage(way)
    init, state = way.split()[0], "reset" if paper else "keep"
    return LanguageRun(
        tokenformer(0),
        (FULL, stage, stage, stage),
        tuple(Growth(tokenformer(n), init, optimizer_state=state) for n in (1, 2, 3)),
        batch=BATCH,
        rate=rate,
        rate_law="none" if paper else "tokens",
        schedule="cosine" if every_stage else "wsd",
        decay=0.3 if every_stage else 1.0,
        floor=0.01,
        every_stage=every_stage,
        validations=2,
    )


def arms(scale: Scale, results: Results) -> dict[tuple[str, ...], Arm]:
    """All tuned runs: by how they grow, or by family, budget and size."""
    found = {}
    for way in WAYS:
        rates = RATES["none" if way == "random" else "tokens"]
        found["grown", way] = tune(lambda r, w=way: scale.fit(chain(w, r)), rates, scale, results)
    for size in range(4):
        models = {("Transformer", "full"): (transformer(size), FULL)}
        if size:
            models["Transformer", "tenth"] = (transformer(size), TENTH)
            models["TokenFormer", "tenth"] = (tokenformer(size), TENTH)
        for name, (model, steps) in models.items():
            rates = RATES["none" if name[0] == "Transformer" else "tokens"]
            found[(*name, str(size))] = tune(
                lambda r, m=model, n=steps: scale.fit(from_scratch(m, n, r)), rates, scale, results
            )
    return found


def best_way(tuned: dict[tuple[str, ...], Arm], results: Results) -> str | None:
    """The way to grow with the lowest mean loss; None until all are finished."""
    runs = {way: tuned["grown", way].runs for way in WAYS}
    if not all(found and results.has_all(found) for found in runs.values()):
        return None
    return min(WAYS, key=lambda way: summarize(runs[way], results).mean)


def stage_runs(way: str, rate: float, scale: Scale) -> dict[str, list[LanguageRun]]:
    """A way to grow with other budgets per stage."""
    return {
        name: [scale.fit(chain(way, rate, steps)).with_seed(seed) for seed in scale.seeds]
        for name, steps in STAGES.items()
    }


def plan(scale: Scale, results: Results) -> list[Job]:
    if scale.name == "paper":
        from experiments.cluster import RecipeRun

        names = ["progressive", *(f"transformer-{size}" for size in PAPER_SIZES)]
        full = [RecipeRun(f"openwebtext/{name}") for name in names]
        tenth = [
            RecipeRun(f"openwebtext/transformer-{size}", (("run.steps", 57220),), "tenth")
            for size in PAPER_SIZES[1:]
        ]
        return [*full, *tenth]
    tuned = arms(scale, results)
    jobs = [job for arm in tuned.values() for job in arm.jobs]
    if way := best_way(tuned, results):
        budgets = stage_runs(way, tuned["grown", way].runs[0].rate, scale)
        jobs += [run for runs in budgets.values() for run in runs]
    return jobs


def costs(scale: Scale, results: Results) -> Arms:
    """The arms that end at the largest size."""
    found, last = Found(scale, results), str(len(TOKENS) - 1)
    arms = {
        "Transformer from scratch, full budget": ("Transformer", "full", last),
        "Transformer from scratch, a tenth": ("Transformer", "tenth", last),
        "TokenFormer from scratch, a tenth": ("TokenFormer", "tenth", last),
        **{title: ("grown", way) for way, title in WAYS.items()},
    }
    return {title: found.runs[key][:1] for title, key in arms.items()}


class Found:
    """The tuned runs, with their seeds."""

    def __init__(self, scale: Scale, results: Results) -> None:
        self.results = results
        tuned = arms(scale, results)
        self.runs = {key: arm.runs for key, arm in tuned.items()}
        best = best_way(tuned, results)
        assert best is not None
        self.best = best
        self.stages = stage_runs(best, self.runs["grown", best][0].rate, scale)

    def end(self, key: tuple[str, ...]) -> float:
        return summarize(self.runs[key], self.results).mean

    def stage_end(self, runs: list[LanguageRun], size: int) -> list[float]:
        """Return the loss at the end of a stage, of every seed."""
        return [self.results[run]["stage_ends"][size] for run in runs]

    def grown(self, way: str, size: int) -> float:
        return Summary(tuple(self.stage_end(self.runs["grown", way], size))).mean

    def cost(self, key: tuple[str, ...]) -> float:
        return self.runs[key][0].flops

    def stage_costs(self, run: LanguageRun) -> list[float]:
        """FLOPs of every stage of a growing run."""
        return [
            steps * run.batch * model.training_flops(run.length)
            for steps, model in zip(run.steps, run.models, strict=True)
        ]

    def transformer_cost(self, size: int, target: float) -> float:
        """FLOPs that a Transformer from scratch needs to reach a loss: on the line through its two
        budgets, loss over the logarithm of FLOPs. Each budget has a schedule of its own."""
        keys = [("Transformer", name, str(size)) for name in ("tenth", "full")]
        (x0, y0), (x1, y1) = ((math.log(self.cost(key)), self.end(key)) for key in keys)
        slope = (y1 - y0) / (x1 - x0)
        return math.exp(x1 + (target - y1) / slope) if slope < 0 else float("inf")

    def best_transformer(self, compute: float) -> float:
        """The loss of Transformers with the full budget at some compute, between those whose size
        costs less and more; the paper compares equal sizes only."""
        keys = [("Transformer", "full", str(n)) for n in range(4)]
        costs = [math.log(self.cost(key)) for key in keys]
        return interpolate(costs, [self.end(key) for key in keys], math.log(compute))


def interpolate(xs: list[float], ys: list[float], x: float) -> float:
    """Return y at `x` on the lines through points with rising `xs`, extended at the ends."""
    right = next((n for n in range(1, len(xs) - 1) if x <= xs[n]), len(xs) - 1)
    share = (x - xs[right - 1]) / (xs[right] - xs[right - 1])
    return ys[right - 1] + share * (ys[right] - ys[right - 1])


def format_size(size: int) -> str:
    return f"{tokenformer(size).parameters / 1e6:.2f}M"


def figure_table(found: Found) -> Table:
    """Losses of every way to every size, with the paper's perplexities."""
    header = ["held-out bits per byte", *(format_size(n) for n in range(4))]
    header += [f"paper's perplexity at {size.upper()}" for size in PAPER_SIZES]

    def row(name: str, cells: list[str], paper: str | None = None) -> list[str]:
        figures = PERPLEXITY[paper] if paper else (None,) * 4
        return [name, *cells, *("" if f is None else f"{f:.2f}" for f in figures)]

    def summary(key: tuple[str, ...]) -> str:
        return summarize(found.runs[key], found.results).format()

    full = [summary(("Transformer", "full", str(n))) for n in range(4)]
    tenth = ["", *(summary(("Transformer", "tenth", str(n))) for n in (1, 2, 3))]
    ours = ["", *(summary(("TokenFormer", "tenth", str(n))) for n in (1, 2, 3))]
    rows = [
        row("Transformer from scratch, full budget", full, "Transformer, full"),
        row("Transformer from scratch, a tenth", tenth, "Transformer, a tenth"),
        row("TokenFormer from scratch, a tenth", ours),
    ]
    for way, name in WAYS.items():
        runs = found.runs["grown", way]
        cells = [format_ends(found.stage_end(runs, n)) for n in range(4)]
        if not decays_in_every_stage(way):
            cells[:3] = [""] * 3
        rows.append(row(name, cells, "grown, a tenth per stage" if way == "random" else None))
    for name, runs in found.stages.items():
        if name != "a tenth":
            cells = ["", "", "", format_ends(found.stage_end(runs, 3))]
            rows.append(row(f"the best of these, {name} per stage", cells))
    return Table([header, *rows])


def format_ends(values: list[float]) -> str:
    return Summary(tuple(values)).format()


def cost_table(found: Found) -> Table:
    """What growing to the largest size costs, and what a Transformer needs for the same loss."""
    header = [
        f"to {format_size(3)} parameters",
        "bits per byte",
        "FLOPs of the last stage",
        "FLOPs of all stages",
        "Transformer for the same loss",
        "x the last stage",
        "x all stages",
    ]
    rows = []
    for way, name in WAYS.items():
        loss, costs = found.grown(way, 3), found.stage_costs(found.runs["grown", way][0])
        needed = found.transformer_cost(3, loss)
        cells = [f"{loss:.3f}", f"{costs[3]:.2e}", f"{sum(costs):.2e}", f"{needed:.2e}"]
        cells += [f"{needed / costs[3]:.1f}", f"{needed / sum(costs):.1f}"]
        rows.append([name, *cells])
    return Table([header, *rows])


def report(scale: Scale, results: Results) -> Findings:
    found = Found(scale, results)
    costs = found.stage_costs(found.runs["grown", found.best][0])
    loss, full = found.grown(found.best, 3), found.end(("Transformer", "full", "3"))
    tenth = found.end(("Transformer", "tenth", "3"))
    needed = found.transformer_cost(3, loss)
    stage, total = needed / costs[3], needed / sum(costs)
    argument = (
        f"At the largest size the best chain ({WAYS[found.best]}) ends at {loss:.3f} bits per "
        f"byte and the paper's at {found.grown('random', 3):.3f}, the Transformer from scratch at "
        f"{full:.3f} with the full budget and at {tenth:.3f} with a tenth of it. To reach "
        f"{loss:.3f} from scratch the Transformer needs {stage:.1f} times the compute of the last "
        f"stage (paper: {PER_STAGE}) and {total:.1f} times that of all stages (paper: "
        f"{CUMULATIVE})."
    )
    return Findings(
        verdict=verdict_of(loss, full, tenth, total),
        argument=argument,
        headline=f"{total:.1f}x in total and {stage:.1f}x per stage (paper: {CUMULATIVE}x and "
        f"{PER_STAGE}x)",
        tables=[figure_table(found), cost_table(found)],
        plots=[
            Plot(
                "progressive-scaling.png",
                "Loss of four sizes over the compute of all stages and of one stage",
                partial(draw, found),
            )
        ],
        notes=[growth_note(found), size_note(found)],
    )


def verdict_of(loss: float, full: float, tenth: float, total: float) -> Verdict:
    """Whether growing comes as close to the loss of the full budget as in the paper, or is at least
    the cheaper way to its own loss."""
    if loss <= full or gap_left(loss, full, tenth) <= CLOSE:
        return "holds"
    return "not at this scale" if loss < tenth and total > 1 else "does not hold"


def growth_note(found: Found) -> str:
    """What the first growth step does to the loss, by the paper's way and by zero keys."""
    steps = [
        f"`{way}` {found.grown(way, 0):.3f} before and {found.grown(way, 1):.3f} after"
        for way in ("random", "shrink", "zero")
    ]
    return (
        f"The first growth step and its {TENTH} steps of training, from a model whose learning "
        f"rate has decayed: {', '.join(steps)}. The compute that a Transformer needs is read off "
        "the line through its two budgets, loss over the logarithm of FLOPs, and beyond them "
        f"extrapolated. The verdict is on the best of the {len(WAYS)} ways: the claim holds if it "
        "ends below the Transformer with the full budget, or above it by at most "
        f"{CLOSE:.0%} of what a tenth of the budget costs the Transformer, as in the paper."
    )


def size_note(found: Found) -> str:
    """The same compute in a smaller Transformer; the paper compares equal sizes only."""
    grown = found.grown(found.best, 3)
    other = found.best_transformer(found.runs["grown", found.best][0].flops)
    lesson = (
        "growing is a cheap way to a large model, not the cheapest to a loss"
        if other <= grown
        else "growing is the cheaper way to its loss, whatever the size"
    )
    return (
        "Like the paper, all this compares models of equal size. A smaller Transformer, of the "
        "size that can train for the full budget with the compute of all stages, reaches "
        f"{other:.3f} bits per byte against {grown:.3f}: {lesson}."
    )


def draw(found: Found, path: Path) -> None:
    figure, panels = new_figure(10, 4.5, columns=2)
    titles = ("all stages together", "each stage by itself")
    for axes, title in zip(panels, titles, strict=True):
        for name, colour, marker in (("full", BASELINE, "o"), ("tenth", ORANGE, "s")):
            sizes = [n for n in range(4) if n or name == "full"]
            keys = [("Transformer", name, str(n)) for n in sizes]
            points = [(found.cost(key), found.end(key)) for key in keys]
            text = f"Transformer from scratch, {'full budget' if name == 'full' else 'a tenth'}"
            axes.plot(*zip(*points, strict=True), f"{marker}--", color=colour, label=text)
        for way, colour in {"random": LIGHT, "zero": GREEN, found.best: OURS}.items():
            costs = found.stage_costs(found.runs["grown", way][0])
            shown = [sum(costs[: n + 1]) for n in range(4)] if axes is panels[0] else costs
            sizes = range(axes is panels[1], 4) if decays_in_every_stage(way) else range(3, 4)
            points = [(shown[n], found.grown(way, n)) for n in sizes]
            name = WAYS[way].replace("`", "")
            axes.plot(*zip(*points, strict=True), "D-", color=colour, label=name)
        axes.set_xscale("log")
        label(axes, "training FLOPs", "held-out bits per byte", title)
    panels[0].legend(frameon=False, fontsize=8)
    save(figure, path)


EXHIBIT = Exhibit(
    title="Progressive scaling",
    source="Figures 3 and 4, Tables 6 and 7",
    claim="Growing from 124M to 1.4B parameters, with a tenth of the tokens at every later stage, "
    "comes close to Transformers trained from scratch at a third of the total cost and a tenth of "
    "the cost per stage.",
    setting="Byte-level models on enwik8, two layers, width 64 for the TokenFormers; four sizes "
    f"of {', '.join(map(str, TOKENS))} attention tokens in the ratio of the paper's parameters, "
    f"Transformers of equal parameters. The first size and the Transformers train for {FULL:,} "
    f"steps of {128 * BATCH} bytes, later stages and the one-tenth Transformers for {TENTH}; "
    "cosine schedules, or for two chains a constant rate that falls over the last stage. Learning "
    "rates: the best of at least three for every size of a model from scratch, and one for all "
    "stages of a chain; chains with other budgets per stage have that of a tenth.",
    plan=plan,
    report=report,
    arms=costs,
)
