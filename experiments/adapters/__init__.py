"""Token adapters: fine-tuning by added tokens, against LoRA, sparse rows and all parameters.

A model of enwik8 is adapted to Python sources, captions and questions, and a classifier of
Tiny-ImageNet to Fashion-MNIST. Methods are compared at equal trained parameters by what they learn
and what they forget.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean

from experiments.adapters.adapt_run import BASE, AdaptRun, Method
from experiments.adapters.continual import BASE as NO_ADAPTER
from experiments.adapters.continual import (
    CHOSEN,
    MERGED,
    OWN,
    RIGHT,
    SEQUENTIAL,
    Continual,
)
from experiments.adapters.image_adapt_run import BASE as IMAGE_BASE
from experiments.adapters.image_adapt_run import ImageAdaptRun
from experiments.exhibit import Exhibit, Findings, Plot, Scale, Table
from experiments.job import Job, Results, Summary, summarize
from experiments.plots import COLOURS, label, mean_curve, new_figure, save
from experiments.sweep import Arm, tune

CORPORA = ("python", "captions", "questions")
SHARES = ("0.5 %", "2 %", "8 %")
MIDDLE = 1
"""The share at which rates are swept, corpora compared and adapters merged."""
EVERYWHERE = ("q", "k", "v", "o", "ffn")
TOKENS, OWN_NORM, LORA, SPARSE, ALL_TOKENS, ALL_LORA, FULL = METHODS = (
    "added tokens",
    "added tokens, own norm",
    "LoRA on the feed-forward layers",
    "sparse rows",
    "added tokens, all layers",
    "LoRA, all layers",
    "all parameters",
)
SIZES: dict[str, Sequence[Method]] = {
    TOKENS: [Method("tokens", n) for n in (5, 20, 80)],
    OWN_NORM: [Method("tokens", n, norm="own") for n in (5, 20, 80)],
    LORA: [Method("lora", n) for n in (1, 4, 16)],
    SPARSE: [Method("sparse", n) for n in (5, 20, 80)],
    ALL_TOKENS: [Method("tokens", n, EVERYWHERE) for n in (1, 4, 16)],
    ALL_LORA: [Method("lora", n, EVERYWHERE) for n in (1, 2, 6)],
    FULL: [Method("full")] * 3,
}
"""By share of trained parameters. On the feed-forward layers all have exactly as many; LoRA on all
layers has 13,312 a rank, so its smallest share is 1.2 %."""
RATES = {
    "tokens": (8e-3, 1.6e-2, 3.2e-2),
    "lora": (2e-3, 4e-3, 8e-3),
    "sparse": (8e-3, 1.6e-2, 3.2e-2),
    "full": (2.5e-4, 5e-4, 1e-3),
}
IMAGE_RATES = {
    "tokens": (2e-3, 4e-3, 8e-3),
    "lora": (1e-3, 2e-3, 4e-3),
    "full": (2.5e-4, 5e-4, 1e-3),
}
IMAGE_METHODS = {
    TOKENS: Method("tokens", 12),
    LORA: Method("lora", 3),
    FULL: Method("full"),
}
"""For a classifier with 192 feed-forward tokens of width 64: 6,144 parameters and a new head."""
SEQUENTIAL_RANK = 12
"""One LoRA for three corpora, with as many parameters as three adapters of the middle share."""


def tuned(name: str, scale: Scale, results: Results) -> Arm:
    """Return the sweep and the seeds on the first corpus at the middle share."""
    method = SIZES[name][MIDDLE]
    return tune(
        lambda rate: scale.fit(AdaptRun(method, CORPORA[0], rate)),
        RATES[method.name],
        scale,
        results,
    )


def runs_of(arm: Arm, name: str, share: int, corpus: str) -> list[AdaptRun]:
    """Return the seeds of a method at another share or on another corpus, at the same rate."""
    return [replace(run, method=SIZES[name][share], corpus=corpus) for run in arm.runs]


def settings(name: str) -> list[tuple[int, str]]:
    """Return the shares and corpora that a method is measured on."""
    shares = range(len(SHARES)) if name != FULL else [MIDDLE]
    others = [(MIDDLE, corpus) for corpus in CORPORA[1:]]
    return [*((share, CORPORA[0]) for share in shares), *others]


def continual_runs(scale: Scale, results: Results) -> tuple[list[Job], list[Continual]]:
    """Return the runs of one LoRA through all corpora, and the comparisons of every seed."""
    tokens, lora = tuned(TOKENS, scale, results), tuned(LORA, scale, results)
    jobs: list[Job] = []
    comparisons = []
    for own, first in zip(tokens.runs, lora.runs, strict=False):
        run = replace(first, method=Method("lora", SEQUENTIAL_RANK))
        chain = [run]
        for corpus in CORPORA[1:]:
            chain.append(replace(run, corpus=corpus, after=chain[-1]))
        adapters = tuple(replace(own, corpus=corpus) for corpus in CORPORA)
        comparison: Continual = scale.fit(Continual(adapters, chain[-1]))
        jobs += [*chain, comparison]
        comparisons.append(comparison)
    return jobs, comparisons


def tuned_images(name: str, scale: Scale, results: Results) -> Arm:
    method = IMAGE_METHODS[name]
    return tune(
        lambda rate: scale.fit(ImageAdaptRun(method, rate)),
        IMAGE_RATES[method.name],
        scale,
        results,
    )


def plan(scale: Scale, results: Results) -> list[Job]:
    if scale.name == "paper":
        return []
    jobs: list[Job] = []
    for name in METHODS:
        arm = tuned(name, scale, results)
        jobs += arm.jobs
        for share, corpus in settings(name):
            jobs += runs_of(arm, name, share, corpus)
    jobs += continual_runs(scale, results)[0]
    for name in IMAGE_METHODS:
        jobs += tuned_images(name, scale, results).jobs
    return jobs


def forgetting(runs: Sequence[AdaptRun], results: Results) -> Summary:
    """Return the rise of the loss on the corpus of the base."""
    rows = [results[run] for run in runs]
    return Summary(tuple(row["kept_bits_per_byte"] - row["kept_at_start"] for row in rows))


def at_acquisition(runs: Sequence[AdaptRun], results: Results, target: float) -> float | None:
    """Return the forgetting at the point of the mean curve where the loss on the new corpus is
    `target`, interpolated; None if it is not reached."""
    before = None
    for point in curve_of(runs, results):
        _, new, kept = point
        if new <= target:
            if before is None or before[1] == new:
                return kept
            share = (before[1] - target) / (before[1] - new)
            return before[2] + share * (kept - before[2])
        before = point
    return None


def curve_of(runs: Sequence[AdaptRun], results: Results) -> list[list[float]]:
    """Return (step, bits per byte on the new corpus, forgetting), means over the seeds."""
    rows = [results[run] for run in runs]
    new = mean_curve([[[step, a] for step, a, _ in row["curve"]] for row in rows])
    kept = mean_curve(
        [[[step, b - row["kept_at_start"]] for step, _, b in row["curve"]] for row in rows]
    )
    return [[step, a, b] for (step, a), (_, b) in zip(new, kept, strict=True)]


Found = dict[str, dict[tuple[int, str], list[AdaptRun]]]


def find(scale: Scale, results: Results) -> Found:
    """Return the runs of every method by share and corpus."""
    found: Found = {}
    for name in METHODS:
        arm = tuned(name, scale, results)
        found[name] = {place: runs_of(arm, name, *place) for place in settings(name)}
    return found


def share_table(found: Found, results: Results) -> Table:
    header = ["Python sources", "trained parameters", "learning rate", "new, bits per byte"]
    header += ["forgotten", "forgotten at LoRA's loss", "adapter", "seconds"]
    rows = []
    for share, title in enumerate(SHARES):
        place = (share, CORPORA[0])
        target = summarize(found[LORA][place], results).mean
        for name in METHODS:
            if place not in found[name]:
                continue
            runs = found[name][place]
            row, at = results[runs[0]], at_acquisition(runs, results, target)
            rows.append(
                [
                    f"{title}: {name}" if name != FULL else name,
                    f"{row['trained_parameters']:,}",
                    f"{runs[0].rate:g}",
                    summarize(runs, results).format(),
                    forgetting(runs, results).format(),
                    "not reached" if at is None else f"{at:+.3f}",
                    f"{row['bytes'] / 1e3:,.0f} kB",
                    f"{mean(results[run]['seconds'] for run in runs):.0f}",
                ]
            )
    return Table([header, *rows])


def corpus_table(found: Found, results: Results) -> Table:
    header = [f"{SHARES[MIDDLE]} of the parameters"]
    for corpus in CORPORA:
        header += [corpus, "forgotten", "at LoRA's loss"]
    rows = []
    for name in METHODS:
        cells = [name]
        for corpus in CORPORA:
            runs = found[name][MIDDLE, corpus]
            target = summarize(found[LORA][MIDDLE, corpus], results).mean
            at = at_acquisition(runs, results, target)
            cells += [summarize(runs, results).format(), forgetting(runs, results).format()]
            cells.append("not reached" if at is None else f"{at:+.3f}")
        rows.append(cells)
    return Table([header, *rows])


def continual_table(comparisons: Sequence[Continual], results: Results) -> Table:
    corpora = comparisons[0].corpora
    rows = [["second half of held-out texts, bits per byte", *corpora, "mean"]]
    for way in (NO_ADAPTER, OWN, CHOSEN, MERGED, SEQUENTIAL):
        scores = [
            Summary(tuple(results[job][corpus][way] for job in comparisons)) for corpus in corpora
        ]
        average = mean(score.mean for score in scores)
        rows.append([way, *(score.format() for score in scores), f"{average:.3f}"])
    right = [mean(results[job][corpus][RIGHT] for job in comparisons) for corpus in corpora]
    rows.append(["chosen right", *(f"{share:.0%}" for share in right), f"{mean(right):.0%}"])
    return Table(rows)


def image_table(scale: Scale, results: Results) -> Table:
    header = ["Tiny-ImageNet to Fashion-MNIST", "trained parameters", "rate", "Fashion-MNIST, %"]
    header += ["Tiny-ImageNet before, %", "after, %", "loss before", "after"]
    rows = [header]
    for name in IMAGE_METHODS:
        runs = tuned_images(name, scale, results).runs
        found = [results[run] for run in runs]
        new = Summary(tuple(100 * row["accuracy"] for row in found))
        cells = [name, f"{found[0]['trained_parameters']:,}", f"{runs[0].rate:g}", new.format(1)]
        cells.append(f"{100 * found[0]['kept_accuracy'][0]:.1f}")
        cells.append(Summary(tuple(100 * row["kept_accuracy"][1] for row in found)).format(1))
        cells.append(f"{found[0]['kept_loss'][0]:.3f}")
        cells.append(Summary(tuple(row["kept_loss"][1] for row in found)).format())
        rows.append(cells)
    return Table(rows)


def report(scale: Scale, results: Results) -> Findings:
    found = find(scale, results)
    _, comparisons = continual_runs(scale, results)
    place = (MIDDLE, CORPORA[0])
    lora = summarize(found[LORA][place], results)
    lost = forgetting(found[LORA][place], results)
    parts = []
    for name in (TOKENS, OWN_NORM):
        at = at_acquisition(found[name][place], results, lora.mean)
        reached = "does not reach that loss" if at is None else f"forgets {at:+.3f} there"
        parts.append(f"{name}: {summarize(found[name][place], results).format()}, {reached}")
    argument = (
        f"On Python sources at {SHARES[MIDDLE]} of the parameters LoRA ends at {lora.format()} "
        f"bits per byte and forgets {lost.format()} of enwik8; {'; '.join(parts)}. All parameters: "
        f"{summarize(found[FULL][place], results).format()}, forgetting "
        f"{forgetting(found[FULL][place], results).format()}."
    )
    return Findings(
        verdict="beyond the paper",
        argument=argument,
        headline=f"LoRA {lora.mean:.3f} and {lost.mean:+.3f}; {parts[0]}",
        tables=[
            share_table(found, results),
            corpus_table(found, results),
            continual_table(comparisons, results),
            image_table(scale, results),
        ],
        plots=[
            Plot(
                "token-adapters.png",
                "Forgetting against acquisition, for every method on three corpora",
                partial(draw, found, results),
            )
        ],
    )


def draw(found: Found, results: Results, path: Path) -> None:
    """Forgetting over the loss on the new corpus, along training, per corpus."""
    figure, axes = new_figure(11, 4.2, columns=len(CORPORA))
    for place, corpus in zip(axes, CORPORA, strict=True):
        for name, colour in zip(METHODS, (*COLOURS, "black"), strict=False):
            points = curve_of(found[name][MIDDLE, corpus], results)
            new, kept = [p[1] for p in points], [p[2] for p in points]
            place.plot(new, kept, "o-", color=colour, markersize=3, linewidth=1.2, label=name)
        place.invert_xaxis()
        label(place, f"bits per byte on {corpus}", "", corpus)
    axes[0].set_ylabel("forgotten of enwik8, bits per byte", fontsize=9, color="0.35")
    axes[0].legend(frameon=False, fontsize=7, loc="upper left")
    save(figure, path)


EXHIBIT = Exhibit(
    title="Token adapters",
    source="named as future work in the paper",
    claim="Tokens added to a frozen model learn new data as well as LoRA at equal parameters and "
    "forget less of the old.",
    setting=f"A byte-level model of enwik8 (recipes/laptop/enwik8.yaml, {BASE.steps[0]:,} steps) "
    f"trains for {AdaptRun().steps} steps of 2,048 bytes on Python sources, captions of Flickr8k "
    "or questions of ARC and PIQA with their answers, of which only the answers count. Rates: the "
    "best of at least three for every method on Python sources at 2 % of the parameters, by the "
    "loss on the new data. Forgetting is the rise of the loss on enwik8. Classifiers: "
    f"{IMAGE_BASE.steps[0]:,} steps on Tiny-ImageNet, {ImageAdaptRun(Method('full')).steps} on "
    "Fashion-MNIST with a new classifier; what is kept is measured with the old one.",
    plan=plan,
    report=report,
    page="token-adapters.md",
)
