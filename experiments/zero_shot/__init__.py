"""Zero-shot accuracy: the paper's two tables of benchmarks, against a Transformer of equal size.

A TokenFormer and a Transformer of the same parameters and training compute read the same bytes of
enwik8, and lm-evaluation-harness evaluates both on the paper's six tasks. Accuracies of models this
small are close to chance; the bits per byte of the right answers can tell them apart.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, variance

from experiments.exhibit import Arms, Exhibit, Findings, Plot, Scale, Table, Verdict
from experiments.job import Job, Results, Summary, summarize
from experiments.language import LanguageRun, Model
from experiments.plots import BASELINE, INK, OURS, label, new_figure, save
from experiments.sweep import Arm, tune
from experiments.zero_shot.evaluation import Items, ZeroShot
from tokenformer.evaluate.benchmarks import BENCHMARKS, PERPLEXITY
from tokenformer.evaluate.paper_tables import ZERO_SHOT, PaperModel
from tokenformer.evaluate.scores import rounded

STEPS = 500
FAMILIES = {
    "TokenFormer": Model(width=128, layers=3, tokens=96),
    "Transformer": Model("transformer", width=128, layers=3, tokens=96),
}
"""96 tokens for a width of 128 are the paper's ratio of 576 for 768, at which a TokenFormer has as
many parameters as a Transformer of its width with feed-forward layers four times as wide."""
RATES = {"TokenFormer": (4e-3, 8e-3, 1.6e-2), "Transformer": (2e-3, 4e-3, 8e-3)}
"""Of a TokenFormer with the rate law, of a Transformer without."""
COMPARED = {
    "TokenFormer": next(m for m in ZERO_SHOT if (m.name, m.size) == ("TokenFormer", "150M")),
    "Transformer": next(m for m in ZERO_SHOT if (m.name, m.size) == ("Pythia", "160M")),
}
"""The smallest pair of the paper's table."""
CHANCE = mean(benchmark.chance for benchmark in BENCHMARKS.values())
HUB = {
    "Pythia-160M": "EleutherAI/pythia-160m",
    "Pythia-410M": "EleutherAI/pythia-410m",
    "Pythia-1B": "EleutherAI/pythia-1b",
    "Pythia-1.3B": "EleutherAI/pythia-1.4b",
    "Pythia-2.8B": "EleutherAI/pythia-2.8b",
    "Mamba-130M": "state-spaces/mamba-130m-hf",
    "Mamba-370M": "state-spaces/mamba-370m-hf",
    "Mamba-790M": "state-spaces/mamba-790m-hf",
    "Mamba-1.4B": "state-spaces/mamba-1.4b-hf",
    "GPT-Neo-1.3B": "EleutherAI/gpt-neo-1.3B",
    "GPT-Neo-2.7B": "EleutherAI/gpt-neo-2.7B",
    "OPT-1.3B": "facebook/opt-1.3b",
    "OPT-2.7B": "facebook/opt-2.7b",
    "RWKV-1.5B": "RWKV/rwkv-4-1b5-pile",
    "TokenFormer-150M": "Haiyang-W/TokenFormer-150M",
    "TokenFormer-450M": "Haiyang-W/TokenFormer-450M",
    "TokenFormer-900M": "Haiyang-W/TokenFormer-900M",
    "TokenFormer-1.5B": "Haiyang-W/TokenFormer-1-5B",
}
"""Names on the hub; transformers has no class for Hybrid H3."""

RULE = (
    "The claim holds if the average accuracy of the TokenFormer is at most two standard errors "
    "below that of the Transformer. Two models within two standard errors of guessing cannot tell."
)
TRAINING = (
    "The paper's own models take a cluster: `python -m experiments run zero_shot --scale paper` "
    "trains `recipes/pile/150m.yaml` and the three larger ones, and `tokenformer evaluate RUN "
    "--tasks paper` evaluates each run."
)


def language_run(family: str, rate: float) -> LanguageRun:
    return LanguageRun(
        FAMILIES[family],
        (STEPS,),
        length=256,
        batch=8,
        rate=rate,
        rate_law=FAMILIES[family].rate_law,
        schedule="cosine",
        floor=0.1,
        validations=4,
    )


def tuned(family: str, scale: Scale, results: Results) -> Arm:
    return tune(lambda rate: scale.fit(language_run(family, rate)), RATES[family], scale, results)


def evaluations(family: str, scale: Scale, results: Results) -> list[ZeroShot]:
    """The models with the best learning rate, a seed each; none until the sweep is finished."""
    return [scale.fit(ZeroShot(run)) for run in tuned(family, scale, results).runs]


def plan(scale: Scale, results: Results) -> list[Job]:
    if scale.name == "paper":
        from experiments.cluster import RecipeRun

        return [RecipeRun(f"pile/{size}") for size in ("150m", "450m", "900m", "1.5b")]
    jobs: list[Job] = [scale.fit(Items())]
    for family in FAMILIES:
        jobs += tuned(family, scale, results).jobs
        jobs += evaluations(family, scale, results)
    return jobs


def costs(scale: Scale, results: Results) -> Arms:
    return {family: tuned(family, scale, results).runs[:1] for family in FAMILIES}


@dataclass(frozen=True)
class Estimate:
    value: float
    error: float
    """One standard error over the items."""

    def format(self, digits: int, sign: str = "") -> str:
        return f"{self.value:{sign}.{digits}f} ± {self.error:.{digits}f}"


class Found:
    """The evaluated models of both families; estimates are means over their seeds."""

    def __init__(self, scale: Scale, results: Results) -> None:
        self.results = results
        self.jobs = {family: evaluations(family, scale, results) for family in FAMILIES}

    def accuracy(self, family: str, task: str | None = None) -> Estimate:
        """Return the accuracy in one task, or the average of all. All seeds answer the same items,
        so the error is not divided by their number."""
        rows = [self.results[job] for job in self.jobs[family]]
        rows = rows if task is None else [row["tasks"][task] for row in rows]
        return Estimate(mean(row["accuracy"] for row in rows), mean(row["error"] for row in rows))

    def lambada_perplexity(self, family: str) -> Estimate:
        pairs = [self.results[job]["lambada_perplexity"] for job in self.jobs[family]]
        return Estimate(mean(value for value, _ in pairs), mean(error for _, error in pairs))

    def held_out(self, family: str) -> Summary:
        return summarize([job.trained for job in self.jobs[family]], self.results)

    def right_answers(self, family: str, tasks: Iterable[str]) -> Summary:
        """Return the bits per byte of the right answers of every seed."""
        names = list(tasks)
        return Summary(
            tuple(
                sum(sum(self.results[job]["tasks"][name]["bits"]) for name in names)
                / sum(self.results[job]["tasks"][name]["bytes"] for name in names)
                for job in self.jobs[family]
            )
        )

    def difference(self, tasks: Iterable[str]) -> Estimate:
        """Return by how many bits per byte of the right answers the TokenFormer needs more than the
        Transformer. The models answer the same items, so the error is that of their differences."""
        total, spread, size = 0.0, 0.0, 0
        for task in tasks:
            ours, theirs = (self.bits_by_item(family, task) for family in FAMILIES)
            differences = [a - b for a, b in zip(ours, theirs, strict=True)]
            total += sum(differences)
            spread += len(differences) * variance(differences)
            size += self.results[self.jobs["TokenFormer"][0]]["tasks"][task]["bytes"]
        return Estimate(total / size, math.sqrt(spread) / size)

    def bits_by_item(self, family: str, task: str) -> list[float]:
        """Return the mean over the seeds of the bits of every right answer."""
        seeds = [self.results[job]["tasks"][task]["bits"] for job in self.jobs[family]]
        return [mean(values) for values in zip(*seeds, strict=True)]

    @property
    def items(self) -> int:
        first = self.results[self.jobs["TokenFormer"][0]]
        return max(row["items"] for row in first["tasks"].values())


def score_table(found: Found) -> Table:
    paper = list(COMPARED.values())
    header = ["", "chance", *FAMILIES, *(f"paper: {m.name}-{m.size}" for m in paper)]
    held_out = [found.held_out(family).format() for family in FAMILIES]
    perplexities = [found.lambada_perplexity(family) for family in FAMILIES]
    pairs = [[rounded(p.value, PERPLEXITY), rounded(p.error, PERPLEXITY)] for p in perplexities]
    rows = [
        [
            "held-out bits per byte (paper: Pile perplexity)",
            "",
            *held_out,
            *(f"{model.pile_perplexity:.2f}" for model in paper),
        ],
        [
            "LAMBADA perplexity",
            "",
            *(" ± ".join(pair) for pair in pairs),
            *(f"{model.lambada_perplexity:.2f}" for model in paper),
        ],
    ]
    for place, (task, benchmark) in enumerate(BENCHMARKS.items()):
        ours = [found.accuracy(family, task).format(1) for family in FAMILIES]
        theirs = [f"{model.accuracies[place]:.1f}" for model in paper]
        rows.append([benchmark.title, f"{benchmark.chance:.1f}", *ours, *theirs])
    ours = [found.accuracy(family).format(1) for family in FAMILIES]
    averages = [f"{model.average:.1f}" for model in paper]
    rows.append(["**average accuracy**", f"{CHANCE:.1f}", *ours, *averages])
    return Table(
        [header, *rows],
        f"Accuracies in percent, on the first {found.items} items of each task; mean over the "
        "seeds ± one standard error over the items. The paper's averages are recomputed from its "
        "six accuracies: that of Pythia-160M is printed as 40.1 and 40.6.",
    )


def answer_table(found: Found) -> Table:
    rows = [["bits per byte of the right answers", *FAMILIES, "difference"]]
    tasks = {benchmark.title: [task] for task, benchmark in BENCHMARKS.items()}
    for title, names in {**tasks, "**all six**": list(BENCHMARKS)}.items():
        cells = [found.right_answers(family, names).format() for family in FAMILIES]
        rows.append([title, *cells, found.difference(names).format(3, "+")])
    return Table(
        rows,
        "The right answer of every item after its context. The difference is TokenFormer minus "
        "Transformer on the same items, ± one standard error over the items.",
    )


def command_table() -> Table:
    rows = [["paper's model", "LAMBADA perplexity", "average accuracy", "command"]]
    for model in ZERO_SHOT:
        figures = [f"{model.lambada_perplexity:.2f}", f"{model.average:.1f}"]
        rows.append([f"{model.name}-{model.size}", *figures, command(model)])
    return Table(
        rows,
        "The paper's models, and the command that evaluates each from the hub. We had no access to "
        "these weights: the figures are the paper's.",
    )


def command(model: PaperModel) -> str:
    name = HUB.get(f"{model.name}-{model.size}")
    if name is None:
        return ""
    if model.name != "TokenFormer":
        return f"`tokenformer evaluate {name} --tasks paper`"
    folder = f"models/{model.size.lower()}"
    return (
        f"`tokenformer convert {name} --out {folder}`, "
        f"`tokenformer evaluate {folder} --tasks paper`"
    )


def judge(ours: Estimate, theirs: Estimate) -> Verdict:
    """Judge the average accuracies: models that guess show nothing about the claim."""
    if all(abs(found.value - CHANCE) <= 2 * found.error for found in (ours, theirs)):
        return "not at this scale"
    error = math.hypot(ours.error, theirs.error)
    return "holds" if ours.value >= theirs.value - 2 * error else "does not hold"


def report(scale: Scale, results: Results) -> Findings:
    found = Found(scale, results)
    ours, theirs = (found.accuracy(family) for family in FAMILIES)
    bits = [found.right_answers(family, BENCHMARKS) for family in FAMILIES]
    lower = sum(a < b for a, b in zip(*(each.values for each in bits), strict=True))
    verdict = judge(ours, theirs)
    relation = "within" if verdict == "not at this scale" else "not both within"
    argument = (
        f"The average accuracies, {ours.format(1)} % for the TokenFormer and {theirs.format(1)} % "
        f"for the Transformer, are {relation} two standard errors of guessing ({CHANCE:.1f} %). "
        f"The right answers take the TokenFormer {bits[0].mean:.3f} bits per byte and the "
        f"Transformer {bits[1].mean:.3f}, a difference of "
        f"{found.difference(BENCHMARKS).format(3, '+')}; the TokenFormer needs fewer bits in "
        f"{lower} of {len(bits[0].values)} seeds."
    )
    paper = [f"{model.average:.1f}" for model in COMPARED.values()]
    return Findings(
        verdict=verdict,
        argument=argument,
        headline=f"average accuracy {ours.value:.1f} and {theirs.value:.1f} % (paper's smallest "
        f"pair: {paper[0]} and {paper[1]} %); right answers at {bits[0].mean:.2f} and "
        f"{bits[1].mean:.2f} bits per byte",
        tables=[score_table(found), answer_table(found), command_table()],
        notes=[RULE, TRAINING],
        plots=[
            Plot(
                "zero-shot.png",
                "Accuracies against chance, and the difference in bits per byte of the right "
                "answers; the lines are one standard error",
                partial(draw, found),
            )
        ],
    )


def draw(found: Found, path: Path) -> None:
    figure, (left, right) = new_figure(10, 3.8, columns=2)
    titles = [benchmark.title for benchmark in BENCHMARKS.values()]
    chances = [*(benchmark.chance for benchmark in BENCHMARKS.values()), CHANCE]
    tasks: Sequence[str | None] = [*BENCHMARKS, None]
    for place, chance in enumerate(chances):
        ends = (place - 0.35, place + 0.35)
        left.plot((chance, chance), ends, color=INK, linewidth=1, label="" if place else "chance")
    for family, colour, shift in (("TokenFormer", OURS, -0.14), ("Transformer", BASELINE, 0.14)):
        found_here = [found.accuracy(family, task) for task in tasks]
        left.errorbar(
            [estimate.value for estimate in found_here],
            [place + shift for place in range(len(tasks))],
            xerr=[estimate.error for estimate in found_here],
            fmt="o",
            markersize=5,
            color=colour,
            label=family,
        )
    left.legend(frameon=False, fontsize=8, loc="center left")
    groups = [[task] for task in BENCHMARKS] + [list(BENCHMARKS)]
    differences = [found.difference(names) for names in groups]
    right.axvline(0, color=INK, linewidth=1)
    right.errorbar(
        [estimate.value for estimate in differences],
        range(len(groups)),
        xerr=[estimate.error for estimate in differences],
        fmt="o",
        markersize=5,
        color=OURS,
    )
    for axes, last in ((left, "average"), (right, "all six")):
        axes.set_yticks(range(len(tasks)), [*titles, last])
        axes.invert_yaxis()
    label(left, "accuracy, %", title="accuracy")
    label(right, "TokenFormer minus Transformer, bits per byte", title="right answers")
    save(figure, path)


EXHIBIT = Exhibit(
    title="Zero-shot accuracy",
    source="Tables 1 and 10",
    claim="On six zero-shot benchmarks a TokenFormer trained on the Pile is competitive with "
    "open-source Transformers of its size, such as Pythia.",
    setting="Byte-level models of 0.62M parameters on enwik8: a TokenFormer of three layers, width "
    "128 and 96 attention tokens, and the Transformer of the same width, parameters and FLOPs. "
    f"Both read the same bytes, {STEPS} steps of 2,048 in sequences of 256, with a cosine schedule "
    "and the best of at least three learning rates. lm-evaluation-harness, without examples in the "
    "prompt, on the first items of each task; the models see the last 256 bytes of a request.",
    plan=plan,
    report=report,
    arms=costs,
)
