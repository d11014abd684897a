"""Vision-language: joined token sets against a projector and against training from scratch.

A classifier of Tiny-ImageNet and a model of enwik8 and captions are joined, trained on the captions
of Flickr8k, and then on questions about its photographs. What counts is the gain from seeing: the
loss of a caption with its own image against the loss with another one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean

from experiments.exhibit import Exhibit, Findings, Plot, Scale, Table
from experiments.job import Job, Results, Summary, summarize
from experiments.plots import label, new_figure, put_dots, save
from experiments.sweep import Arm, tune
from experiments.vision_language.caption_run import (
    ENWIK8,
    LANGUAGE,
    TEXT_LENGTH,
    VISION,
    CaptionRun,
)
from experiments.vision_language.question_run import CHOICES, QuestionRun
from experiments.workspace import MissingDataError, source

ROUTED, SHARED, PROJECTOR, ROUTED_ALL, SHARED_ALL, PROJECTOR_ALL, FRESH = ARMS = (
    "routed, new tokens",
    "shared, new tokens",
    "projector, trained alone",
    "routed, all trained",
    "shared, all trained",
    "projector and language model",
    "routed, fresh weights",
)
BLIND, BLIND_ALL, FRESH_LONG = (
    "routed, new tokens, without seeing",
    "routed, all trained, without seeing",
    "routed, fresh weights, compute of all stages",
)
RUNS: dict[str, CaptionRun] = {
    ROUTED: CaptionRun("routed", "new"),
    SHARED: CaptionRun("shared", "new"),
    PROJECTOR: CaptionRun("projector", "new"),
    ROUTED_ALL: CaptionRun("routed", "all"),
    SHARED_ALL: CaptionRun("shared", "all"),
    PROJECTOR_ALL: CaptionRun("projector", "all"),
    FRESH: CaptionRun("routed", "all", fresh=True),
}
EQUAL = {ROUTED: PROJECTOR, SHARED: PROJECTOR, ROUTED_ALL: PROJECTOR_ALL, SHARED_ALL: PROJECTOR_ALL}
"""The baseline of an arm: the same parts are trained."""
FEW, MANY, UNTRAINED = (2e-3, 4e-3, 8e-3), (5e-4, 1e-3, 2e-3), (2e-3, 4e-3, 8e-3)
OTHER_IMAGES = "other-images"
ANSWERS_ALL, ANSWERS_NEW, ANSWERS_PROJECTOR, ANSWERS_BLIND = QUESTION_ARMS = (
    "routed, all trained",
    "routed, new tokens",
    "projector and language model",
    "routed, all trained, without seeing",
)


def rates_of(name: str) -> Sequence[float]:
    if name == FRESH:
        return UNTRAINED
    return FEW if RUNS[name].trained == "new" else MANY


def caption_arms(scale: Scale, results: Results) -> dict[str, Arm]:
    """Return all arms on captions. Those that do not see have the rates of those that do."""
    arms = {
        name: tune(
            lambda rate, run=run: scale.fit(replace(run, rate=rate)),  # type: ignore[misc]
            rates_of(name),
            scale,
            results,
        )
        for name, run in RUNS.items()
    }
    for blind, seeing in ((BLIND, ROUTED), (BLIND_ALL, ROUTED_ALL)):
        arms[blind] = Arm([], [replace(run, images=OTHER_IMAGES) for run in arms[seeing].runs])
    arms[FRESH_LONG] = Arm([], [longer(run, scale) for run in arms[FRESH].runs[:1]])
    return arms


def longer(run: CaptionRun, scale: Scale) -> CaptionRun:
    """Return a run from fresh weights with the compute of pretraining and of this run."""
    if scale.name == "smoke":
        return replace(run, steps=run.steps + 1)
    before = VISION.flops + ENWIK8.flops + LANGUAGE.flops
    return replace(run, steps=round(run.steps * (1 + before / run.flops)))


def question_arms(scale: Scale, results: Results) -> dict[str, Arm]:
    """Return all arms on questions; each seed goes on from that seed of the captions."""
    captions = caption_arms(scale, results)

    def tuned(start: str, trained: str, rates: Sequence[float]) -> Arm:
        if not captions[start].runs:
            return Arm([], [])
        first = captions[start].runs[0]
        return tune(
            lambda rate: replace(fitted(first, trained, scale), rate=rate), rates, scale, results
        )

    seeing = tuned(ROUTED, "all", MANY)
    blind = [
        replace(run, start=start, images="other-images-questions")
        for run, start in zip(seeing.runs, captions[BLIND].runs, strict=False)
    ]
    return {
        ANSWERS_ALL: seeing,
        ANSWERS_NEW: tuned(ROUTED, "new", FEW),
        ANSWERS_PROJECTOR: tuned(PROJECTOR, "all", MANY),
        ANSWERS_BLIND: Arm([], blind),
    }


def fitted(start: CaptionRun, trained: str, scale: Scale) -> QuestionRun:
    run: QuestionRun = scale.fit(QuestionRun(start, trained))
    return replace(run, start=start)


def plan(scale: Scale, results: Results) -> list[Job]:
    if scale.name == "paper":
        return []
    arms = [*caption_arms(scale, results).values(), *question_arms(scale, results).values()]
    return [job for arm in arms for job in arm.jobs]


def gains(runs: Sequence[CaptionRun], results: Results) -> Summary:
    """Return by how much another image raises the loss of a caption."""
    rows = [results[run] for run in runs]
    return Summary(tuple(row["bits_per_byte_wrong_image"] - row["bits_per_byte"] for row in rows))


def after(runs: Sequence[CaptionRun], results: Results, metric: str, factor: float = 1) -> Summary:
    return Summary(tuple(factor * results[run][metric][1] for run in runs))


def loss_table(arms: Mapping[str, Arm], results: Results) -> Table:
    header = ["captions, held-out bits per byte", "trained parameters", "learning rate", "steps"]
    header += ["right image", "another image", "no image", "gain from seeing"]
    rows = []
    for name, arm in arms.items():
        first = results[arm.runs[0]]
        cells = [name, f"{first['trained_parameters']:,}", f"{arm.runs[0].rate:g}"]
        cells.append(f"{arm.runs[0].steps:,}")
        for metric in ("bits_per_byte", "bits_per_byte_wrong_image", "bits_per_byte_no_image"):
            cells.append(summarize(arm.runs, results, metric).format())
        rows.append([*cells, gains(arm.runs, results).format()])
    return Table([header, *rows])


def caption_table(arms: Mapping[str, Arm], results: Results) -> Table:
    header = ["greedy captions, retrieval among ten", "BLEU-4", "CIDEr-D", "caption found, %"]
    header += ["image found, %", "FLOPs", "core-seconds"]
    rows = []
    for name, arm in arms.items():
        found = [results[run] for run in arm.runs]
        cells = [name, Summary(tuple(row["bleu"][3] for row in found)).format()]
        cells.append(summarize(arm.runs, results, "cider").format())
        for metric in ("text_retrieval", "image_retrieval"):
            cells.append(Summary(tuple(100 * row[metric] for row in found)).format(0))
        cells.append(f"{found[0]['flops']:.2e}")
        rows.append([*cells, f"{mean(row['seconds'] for row in found):.0f}"])
    return Table([header, *rows])


def kept_table(arms: Mapping[str, Arm], results: Results) -> Table:
    first = results[next(iter(arms.values())).runs[0]]
    rows = [["what is kept", "enwik8, bits per byte", "Tiny-ImageNet, top-1 in %"]]
    before = (first["kept_bits_per_byte"][0], 100 * first["kept_accuracy"][0])
    rows.append(["before", f"{before[0]:.3f}", f"{before[1]:.1f}"])
    for name, arm in arms.items():
        if name in (FRESH, FRESH_LONG):
            continue
        text = after(arm.runs, results, "kept_bits_per_byte")
        images = after(arm.runs, results, "kept_accuracy", 100)
        rows.append([name, text.format(), images.format(1)])
    return Table(rows)


def question_table(arms: Mapping[str, Arm], results: Results) -> Table:
    kinds = [*CHOICES, "all"]
    first = results[next(iter(arms.values())).runs[0]]
    counts = first["questions"] | {"all": sum(first["questions"].values())}
    header = ["answers, % right", "learning rate"]
    header += [f"{kind} ({counts[kind]})" for kind in kinds if kind in counts]
    kinds = [kind for kind in kinds if kind in counts]
    rows = [["majority answer to the question", ""]]
    rows[0] += [f"{100 * first['majority'][kind]:.1f}" for kind in kinds]
    for name, arm in arms.items():
        cells = [name, f"{arm.runs[0].rate:g}"]
        for kind in kinds:
            found = tuple(100 * results[run]["accuracies"][kind] for run in arm.runs)
            cells.append(Summary(found).format(1))
        rows.append(cells)
    return Table([header, *rows])


def shown_table(arm: Arm, results: Results) -> Table:
    rows = [["", "by the model", "by a person"]]
    shown = results[arm.runs[0]]["shown"]
    for number, (_, (ours, theirs)) in enumerate(sorted(shown.items(), key=by_row), 1):
        rows.append([str(number), ours.replace("|", "/"), theirs.replace("|", "/")])
    return Table(rows, "The captions of the picture above, row by row from the left.")


def by_row(item: tuple[str, object]) -> int:
    return int(item[0])


def seeing_argument(arms: Mapping[str, Arm], results: Results) -> str:
    bits = {name: arm.summary(results) for name, arm in arms.items()}

    def told(name: str) -> str:
        return f"{bits[name].format()} (gain {gains(arms[name].runs, results).format()})"

    wins = [ours for ours, theirs in EQUAL.items() if bits[theirs].above(bits[ours])]
    few = f"{told(ROUTED)} for `routed`, {told(SHARED)} for `shared`, {told(PROJECTOR)} for a"
    verdict = f"below its baseline in every seed: {'; '.join(wins)}" if wins else "none is below"
    return (
        f"**Seeing.** With about as many trained parameters captions take {few} projector; with "
        f"everything trained {told(ROUTED_ALL)}, {told(SHARED_ALL)} and {told(PROJECTOR_ALL)} "
        f"({verdict}). Without seeing `routed` ends at {bits[BLIND].format()} and "
        f"{bits[BLIND_ALL].format()}."
    )


def scratch_argument(arms: Mapping[str, Arm], results: Results) -> str:
    fresh, long, ours = (arms[name].summary(results) for name in (FRESH, FRESH_LONG, ROUTED_ALL))
    return (
        f"**Against fresh weights.** The same model without pretraining ends at {fresh.format()} "
        f"after as many captions, and at {long.format()} with the compute of pretraining added "
        f"(one seed); joined and trained it ends at {ours.format()}."
    )


def kept_argument(arms: Mapping[str, Arm], results: Results) -> str:
    parts = []
    for name in (ROUTED, ROUTED_ALL, SHARED_ALL):
        rows = [results[run] for run in arms[name].runs]
        text, images = (
            mean(row[metric][1] - row[metric][0] for row in rows)
            for metric in ("kept_bits_per_byte", "kept_accuracy")
        )
        parts.append(f"{name}: {text:+.3f} bits per byte, {100 * images:+.1f} points")
    return f"**Kept** of enwik8 and Tiny-ImageNet after captions. {'; '.join(parts)}."


def question_argument(arms: Mapping[str, Arm], results: Results) -> str:
    def told(name: str) -> str:
        found = tuple(100 * results[run]["accuracy"] for run in arms[name].runs)
        return f"{Summary(found).format(1)} %"

    majority = 100 * results[arms[ANSWERS_ALL].runs[0]]["majority"]["all"]
    return (
        f"**Questions.** After instruction tuning the routed model answers {told(ANSWERS_ALL)} "
        f"right, with only the new tokens trained {told(ANSWERS_NEW)}, with a projector "
        f"{told(ANSWERS_PROJECTOR)}, without seeing {told(ANSWERS_BLIND)}; the most frequent "
        f"answer to each question is right in {majority:.1f} %."
    )


def report(scale: Scale, results: Results) -> Findings:
    captions, answers = caption_arms(scale, results), question_arms(scale, results)
    gain = {name: gains(captions[name].runs, results).mean for name in (ROUTED, PROJECTOR)}
    return Findings(
        verdict="beyond the paper",
        argument="\n\n".join(
            [
                seeing_argument(captions, results),
                scratch_argument(captions, results),
                kept_argument(captions, results),
                question_argument(answers, results),
            ]
        ),
        headline=f"gain from seeing {gain[ROUTED]:.3f} bits per byte, projector "
        f"{gain[PROJECTOR]:.3f}",
        tables=[
            loss_table(captions, results),
            caption_table(captions, results),
            kept_table(captions, results),
            question_table(answers, results),
            shown_table(captions[ROUTED_ALL], results),
        ],
        plots=[
            Plot(
                "vision-language.png",
                "Loss of captions with their image, and what another image costs, per seed",
                partial(draw_seeing, captions, results),
            ),
            Plot(
                "ten-captions.png",
                f"Ten held-out photographs, chosen at random, with the captions of {ROUTED_ALL!r}",
                partial(draw_captions, captions[ROUTED_ALL], results),
            ),
        ],
    )


def draw_seeing(arms: Mapping[str, Arm], results: Results, path: Path) -> None:
    figure, (loss, gain) = new_figure(11, 0.34 * len(arms) + 1.2, columns=2)
    ours = [name for name in arms if name.startswith(("routed, new", "shared, new"))]
    put_dots(loss, {name: arm.summary(results).values for name, arm in arms.items()}, ours)
    put_dots(gain, {name: gains(arm.runs, results).values for name, arm in arms.items()}, ours)
    gain.set_yticklabels([])
    label(loss, "bits per byte of captions with their image")
    label(gain, "more with another image")
    save(figure, path)


def draw_captions(arm: Arm, results: Results, path: Path) -> None:
    """Draw the photographs with their captions. Without the data, a picture that is there stays."""
    from io import BytesIO
    from textwrap import fill

    import pyarrow.parquet
    from PIL import Image

    run = arm.runs[0]
    shown = sorted(results[run]["shown"].items(), key=by_row)
    try:
        table = pyarrow.parquet.read_table(source(run.images) / "validation.parquet")
    except MissingDataError:
        return
    figure, places = new_figure(11, 5.6, rows=2, columns=len(shown) // 2)
    for axes, (row, (ours, _)) in zip(places, shown, strict=True):
        stored = table["image"][int(row)].as_py()["bytes"]
        axes.imshow(Image.open(BytesIO(stored)))
        axes.set_title(fill(ours, 30), fontsize=8)
        axes.axis("off")
    save(figure, path)


EXHIBIT = Exhibit(
    title="Vision-language models",
    source="named as future work in the paper",
    claim="The tokens of a vision and a language model, joined and aligned by new ones, make a "
    "vision-language model that is better than a projector between the two at equal trained "
    "parameters, and than a model from scratch at equal compute.",
    setting=f"A classifier of Tiny-ImageNet ({VISION.steps[0]:,} steps of {VISION.batch} images) "
    f"and a byte-level model of enwik8 ({ENWIK8.steps[0]:,} steps of 2,048 bytes, then "
    f"{LANGUAGE.steps[0]:,} on captions), both of width 128 and four layers, are joined with "
    f"{CaptionRun().new_tokens} new tokens per layer, or by a projector with as many weights, and "
    f"train for {CaptionRun().steps} steps of {CaptionRun().batch} captions of Flickr8k, cut at "
    f"{TEXT_LENGTH} bytes. Rates: the best of at least three per arm, at one seed, by the held-out "
    "loss; arms without seeing train on captions of other photographs, at the rate of those that "
    "see, and are measured like all others. The losses are of 500 captions of 100 held-out images. "
    "Questions are made from captions by rule, and half of those about objects have the answer no.",
    plan=plan,
    report=report,
    page="vision-language.md",
)
