"""Scaling without losing the learned distribution: pretrain, grow, continue on another corpus.

As in the paper: models of the second of the four sizes are trained on one corpus, grow to the third
size, and continue on enwik8 at a constant learning rate with a fresh optimizer. The TokenFormer
grows by zero keys, the Transformer by Net2Net, as the paper writes it (block padding) and as it was
published; a TokenFormer by `random`, models that do not grow and models that have the large size
from the start are controls.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

from experiments.exhibit import Arms, Exhibit, Findings, Plot, Scale, Table, Verdict
from experiments.job import Job, Results, Summary, summarize
from experiments.language import Growth, LanguageRun, Model, reached
from experiments.plots import (
    BASELINE,
    GREEN,
    LIGHT,
    ORANGE,
    OURS,
    PINK,
    label,
    mean_curve,
    new_figure,
    save,
)
from experiments.sweep import Arm, tune

SMALL, LARGE = 152, 336
"""Tokens of the second and third size of progressive scaling, the paper's 354M and 757M."""
PRETRAINING, STEPS, BATCH = 2400, 1200, 4
RATES = {"tokenformer": (2e-3, 4e-3, 8e-3), "transformer": (1e-3, 2e-3, 4e-3)}
"""Where the sweeps begin."""
NOISE = 0.1
PRESERVED = 0.001
"""A change of the loss at growth, in bits per byte, below which the distribution is kept."""


def model(family: str, tokens: int) -> Model:
    return Model(family, tokens, width=64)


TITLES = {"tokenformer": "TokenFormer", "transformer": "Transformer"}
ARMS: dict[str, tuple[str, Growth | None]] = {
    "TokenFormer, `zero`": ("tokenformer", Growth(model("tokenformer", LARGE), "zero")),
    "TokenFormer, `random`": ("tokenformer", Growth(model("tokenformer", LARGE), "random")),
    "TokenFormer, not grown": ("tokenformer", None),
    "Transformer, Net2Net": (
        "transformer",
        Growth(model("transformer", LARGE), method="net2net", noise=NOISE),
    ),
    "Transformer, Net2Net as the paper writes it": (
        "transformer",
        Growth(model("transformer", LARGE), method="block_padding"),
    ),
    "Transformer, not grown": ("transformer", None),
}
FROM_THE_START = {family: f"{title}, large from the start" for family, title in TITLES.items()}
"""Controls without a sweep: the rates of the model that does not grow."""
COLOURS = dict(zip(ARMS, (OURS, LIGHT, GREEN, BASELINE, ORANGE, PINK), strict=True))


def tune_source(family: str, scale: Scale, results: Results) -> Arm:
    def run_at(rate: float) -> LanguageRun:
        small = model(family, SMALL)
        run = LanguageRun(
            small,
            (PRETRAINING,),
            corpus="python",
            batch=BATCH,
            rate=rate,
            rate_law=small.rate_law,
            schedule="cosine",
            floor=0.1,
            validations=4,
        )
        fitted: LanguageRun = scale.fit(run)
        return fitted

    return tune(run_at, RATES[family], scale, results)


def tune_continued(name: str, source: LanguageRun, scale: Scale, results: Results) -> Arm:
    """Continued training at a constant rate. The sweep begins lower than that of pretraining: the
    model is trained already, and the rate does not decay."""
    family, growth = ARMS[name]

    def run_at(rate: float) -> LanguageRun:
        run = LanguageRun(
            steps=(STEPS,),
            growth=() if growth is None else (growth,),
            start=source,
            batch=BATCH,
            rate=rate,
            rate_law=source.rate_law,
            schedule="constant",
            warmup=0,
            remember="python",
            validations=15,
        )
        return replace(scale.fit(run), start=source)

    low, *_ = RATES[family]
    return tune(run_at, (low / 2, low, 2 * low), scale, results)


def tuned_runs(scale: Scale, results: Results) -> tuple[dict[str, Arm], dict[str, Arm]]:
    """Return the arms of pretraining by family, and those of continued training that can be named
    yet."""
    sources = {family: tune_source(family, scale, results) for family in RATES}
    continued = {
        name: tune_continued(name, sources[family].runs[0], scale, results)
        for name, (family, _) in ARMS.items()
        if sources[family].runs
    }
    for family, name in FROM_THE_START.items():
        same = continued.get(f"{TITLES[family]}, not grown")
        large = [at_large(run) for run in same.runs] if same else []
        continued[name] = Arm([run.start for run in large], large)
    return sources, continued


def at_large(run: LanguageRun) -> LanguageRun:
    """Return a run of a model that does not grow, with the large one from pretraining on."""
    assert run.start is not None
    large = model(run.start.model.family, LARGE)
    return replace(run, start=replace(run.start, model=large))


def plan(scale: Scale, results: Results) -> list[Job]:
    if scale.name == "paper":
        return paper_plan()
    arms = [arm for found in tuned_runs(scale, results) for arm in found.values()]
    return [job for arm in arms for job in arm.jobs]


def paper_plan() -> list[Job]:
    """Pretrain on OpenWebText, grow to 757m, continue on enwik8."""
    from experiments.cluster import GrowthRun, RecipeRun

    jobs: list[Job] = []
    for family, growth in (
        ("tokenformer", ("init", "zero")),
        ("transformer", ("method", "block_padding")),
        ("transformer", ("method", "net2net")),
    ):
        grown = GrowthRun(RecipeRun(f"openwebtext/{family}-354m"), (("to", "757m"), growth))
        overrides = (("model.family", family),)
        jobs.append(RecipeRun("openwebtext/enwik8-757m", overrides, growth[1], grown))
    return jobs


def costs(scale: Scale, results: Results) -> Arms:
    _, tuned = tuned_runs(scale, results)
    return {name: [arm.runs[0].start, arm.runs[0]] for name, arm in tuned.items()}


class Found:
    def __init__(self, scale: Scale, results: Results) -> None:
        sources, tuned = tuned_runs(scale, results)
        self.rates = {name: arm.runs[0].rate for name, arm in tuned.items()}
        self.rows = {name: [results[run] for run in arm.runs] for name, arm in tuned.items()}
        self.before = {name: sources[family].summary(results) for name, (family, _) in ARMS.items()}
        for name in FROM_THE_START.values():
            starts = [run.start for run in tuned[name].runs]
            self.before[name] = summarize(starts, results)

    def summary(self, name: str, metric: str) -> Summary:
        return Summary(tuple(row[metric] for row in self.rows[name]))

    def remembered(self, name: str, end: int) -> Summary:
        """Bits per byte on the first corpus, at growth (0) or at the end (1)."""
        return Summary(tuple(row["remembered"][end] for row in self.rows[name]))

    def curve(self, name: str) -> list[list[float]]:
        """Mean bits per byte on enwik8 by steps and FLOPs."""
        return mean_curve([row["curve"] for row in self.rows[name]])

    def lead(self, name: str, *others: str) -> int:
        """The last step up to which an arm is below all others; -1 if it never is."""
        last = -1
        for point, *compared in zip(*map(self.curve, (name, *others)), strict=True):
            if any(point[2] >= other[2] for other in compared):
                break
            last = int(point[0])
        return last

    def compute_to(self, name: str, other: str) -> str:
        """The compute in which one arm reaches the final loss of another, as a share of its."""
        curve, (_, total, final) = self.curve(name), self.curve(other)[-1]
        flops = reached(curve, final)
        if flops is None:
            return f"more than {100 * curve[-1][1] / total:.0f} %"
        return f"{100 * flops / total:.0f} %"


def report(scale: Scale, results: Results) -> Findings:
    found = Found(scale, results)
    zero, paper = "TokenFormer, `zero`", "Transformer, Net2Net as the paper writes it"
    net2net = "Transformer, Net2Net"
    header = [
        "",
        "rate",
        "first corpus before growth",
        "after growth",
        "after training on enwik8",
        "enwik8 at growth",
        "enwik8 at the end",
    ]
    rows = []
    for name in found.rows:
        rows.append(
            [
                name,
                f"{found.rates[name]:g}",
                found.before[name].format(),
                found.remembered(name, 0).format(),
                found.remembered(name, 1).format(),
                found.summary(name, "start_bits_per_byte").format(),
                found.summary(name, "bits_per_byte").format(),
            ]
        )
    ends = {name: found.summary(name, "bits_per_byte").mean for name in found.rows}
    jumps = {
        name: found.remembered(name, 0).mean - found.before[name].mean
        for name, (_, growth) in ARMS.items()
        if growth is not None
    }
    changes = [
        f"{found.remembered(name, 1).mean - found.before[name].mean:+.3f}"
        for name in (zero, net2net, paper)
    ]
    argument = (
        f"Growing by zero keys changes the loss on the first corpus by {jumps[zero]:+.4f} bits per "
        f"byte, Net2Net by {jumps[net2net]:+.3f} and by {jumps[paper]:+.3f} as the paper writes "
        f"it; after {STEPS:,} steps on enwik8 the three are at {ends[zero]:.3f}, "
        f"{ends[net2net]:.3f} and {ends[paper]:.3f}. The TokenFormer needs "
        f"{found.compute_to(zero, net2net)} and {found.compute_to(zero, paper)} of the compute of "
        f"the two Net2Nets to reach their final losses; on the first corpus the training changes "
        f"the three by {changes[0]}, {changes[1]} and {changes[2]}."
    )
    last = found.lead(zero, net2net, paper)
    lead = f"The TokenFormer is below both of them up to step {last:,}."
    if last < 0:
        lead = "The TokenFormer is not below both of them at any step."
    return Findings(
        verdict=verdict_of(
            jumps[zero],
            tokens_help(found),
            *(found.summary(name, "bits_per_byte") for name in (zero, net2net, paper)),
        ),
        argument=argument,
        headline=f"loss at growth {jumps[zero]:+.4f}, {ends[zero]:.3f} at the end; Net2Net as the "
        f"paper writes it {jumps[paper]:+.3f} and {ends[paper]:.3f}",
        tables=[Table([header, *rows], "Held-out bits per byte.")],
        plots=[
            Plot(
                "preserved-distribution.png",
                "Held-out loss on enwik8 from the growth step on",
                partial(draw, found),
            )
        ],
        notes=[
            f"The claim holds if growing by zero keys changes the loss by less than {PRESERVED:g} "
            "bits per byte and all its seeds end below all seeds of both Net2Nets, and so reach "
            "their losses earlier. If it keeps the loss and ends higher, this scale cannot tell "
            "unless a TokenFormer that is large from the start ends lower than the small one. "
            f"{lead} Net2Net has noise of {NOISE:.0%} on its "
            "replicas, which cancels at growth and lets them learn apart.",
            size_note(found, ends),
        ],
    )


def tokens_help(found: Found) -> bool:
    """Whether a TokenFormer that is large from the start ends lower than the small one, in every
    seed: else there is nothing that growing could gain."""
    large = found.summary(FROM_THE_START["tokenformer"], "bits_per_byte")
    return found.summary("TokenFormer, not grown", "bits_per_byte").above(large)


def size_note(found: Found, ends: dict[str, float]) -> str:
    """What the larger size is worth, apart from growth."""
    gains = []
    for family, title in TITLES.items():
        small, large = ends[f"{title}, not grown"], ends[FROM_THE_START[family]]
        gains.append(f"{title} {large - small:+.3f}")
    zero = ends["TokenFormer, `zero`"] - ends[FROM_THE_START["tokenformer"]]
    text = (
        "What the size alone is worth: models of the large size from pretraining on, at the rates "
        f"of those that do not grow, change the end on enwik8 by {' and '.join(gains)} bits per "
        f"byte. The TokenFormer grown by zero keys ends {zero:+.3f} from the one that is large "
        "from the start."
    )
    if not tokens_help(found):
        text += (
            " So at this width the new tokens have nothing to gain, however they are added, and "
            "the comparison of final losses is one of tokens with width."
        )
    return text


def verdict_of(jump: float, can_gain: bool, zero: Summary, *baselines: Summary) -> Verdict:
    if abs(jump) >= PRESERVED:
        return "does not hold"
    if any(zero.mean >= baseline.mean for baseline in baselines):
        return "does not hold" if can_gain else "not at this scale"
    apart = all(baseline.above(zero) for baseline in baselines)
    return "holds" if apart else "not at this scale"


def draw(found: Found, path: Path) -> None:
    """The whole curves, and their last two thirds."""
    figure, panels = new_figure(11, 4.5, columns=2)
    for name in found.rows:
        curve = found.curve(name)
        text = f"{name.replace('`', '')}  {curve[-1][2]:.3f}"
        if name not in COLOURS:
            continue
        dashes = "--" if "not grown" in name else "-"
        for axes, first in zip(panels, (0, curve[-1][0] / 3), strict=True):
            steps, _, bits = zip(*(point for point in curve if point[0] >= first), strict=True)
            axes.plot(steps, bits, dashes, color=COLOURS[name], label=text)
    panels[0].legend(frameon=False, fontsize=8)
    label(panels[0], "steps on enwik8 after growth", "held-out bits per byte", "mean of the seeds")
    label(panels[1], "steps on enwik8 after growth", title="from a third on")
    save(figure, path)


EXHIBIT = Exhibit(
    title="Scaling without losing the learned distribution",
    source="Figure 6",
    claim="A TokenFormer that grows by zero keys keeps its output distribution, converges faster "
    "on new data than a Transformer grown by Net2Net, and ends lower.",
    setting=f"Models of {model('tokenformer', SMALL).tokens} attention tokens, width 64, and "
    f"Transformers of equal parameters train for {PRETRAINING:,} steps of {128 * BATCH} bytes on "
    f"Python's standard library, grow to {LARGE} tokens or the Transformer of that size, and train "
    f"for {STEPS:,} steps on enwik8 at a constant learning rate with a fresh optimizer. Rates: the "
    "best of at least three, for pretraining and for continued training; models that are large "
    "from the start take those of the small.",
    plan=plan,
    report=report,
    arms=costs,
)
