"""Image classification: TokenFormers of equal size and larger, against a Vision Transformer."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

from experiments.exhibit import Arms, Exhibit, Findings, Plot, Scale, Table, Verdict
from experiments.job import Job, Results, Summary
from experiments.plots import label, new_figure, put_dots, save
from experiments.sweep import Arm
from experiments.vision import ImageModel, ImageRun, percentages, tune_images

VIT, EQUAL, LARGER = "ViT", "TokenFormer, equal size", "TokenFormer, larger"
MODELS = {
    VIT: ImageModel("transformer"),
    EQUAL: ImageModel(),
    LARGER: ImageModel(tokens=64),
}
"""48 tokens for a width of 64 match a ViT, as 576 for 768 do; 64 are one per channel."""
PAPER = {VIT: (82.3, 82.6), EQUAL: (82.1, 83.0), LARGER: (82.5, 83.1)}
"""Top-1 on ImageNet-1K with B/16 and L/16, the paper's table; the ViT's figures are MAE's."""
TITLES = {"fashion-mnist": "Fashion-MNIST", "tiny-imagenet": "Tiny-ImageNet"}
TEST_IMAGES = {"fashion-mnist": 10_000, "tiny-imagenet": 2_000}
TINY_STEPS, TINY_BATCH, TINY_PATCH = 1425, 32, 8
"""Two epochs of the 22,800 images that are trained on."""
PAPER_RECIPES = ("transformer-{}", "tokenformer-{}-match", "tokenformer-{}")


def run_of(images: str, model: str) -> ImageRun:
    run = ImageRun(MODELS[model])
    if images == "fashion-mnist":
        return run
    tiny = replace(run.model, patch=TINY_PATCH)
    return replace(run, model=tiny, images=images, steps=(TINY_STEPS,), batch=TINY_BATCH)


def arms(scale: Scale, results: Results) -> dict[tuple[str, str], Arm]:
    """Return the arms by images and model."""
    return {
        (images, model): tune_images(run_of(images, model), scale, results)
        for images in TITLES
        for model in MODELS
    }


def plan(scale: Scale, results: Results) -> list[Job]:
    if scale.name == "paper":
        from experiments.cluster import RecipeRun

        names = [name.format(size) for size in ("base", "large") for name in PAPER_RECIPES]
        return [RecipeRun(f"vision/{name}") for name in names]
    return [job for arm in arms(scale, results).values() for job in arm.jobs]


def costs(scale: Scale, results: Results) -> Arms:
    found = arms(scale, results)
    return {f"{TITLES[images]}: {model}": arm.runs[:1] for (images, model), arm in found.items()}


Scores = dict[tuple[str, str], Summary]
"""Top-1 in percent by images and model."""


def verdict_of(scores: Scores) -> Verdict:
    equal = [not scores[images, VIT].above(scores[images, EQUAL]) for images in TITLES]
    if all(equal):
        return "holds"
    return "not at this scale" if any(equal) else "does not hold"


def standard_error(percent: float, count: int) -> float:
    """Return the standard error of an accuracy, in points."""
    return math.sqrt(percent * (100 - percent) / count)


def result_table(found: dict[tuple[str, str], Arm], results: Results) -> Table:
    header = ["images", "model", "parameters", "learning rate"]
    rows = []
    for (images, model), arm in found.items():
        run = arm.runs[0]
        rows.append(
            [
                TITLES[images],
                model,
                f"{results[run]['parameters']:,}",
                f"{run.rate:g}",
                percentages(arm, results).format(2),
                percentages(arm, results, "top_5").format(2),
                arm.summary(results, "loss").format(),
            ]
        )
    return Table([[*header, "top-1, %", "top-5, %", "test loss"], *rows])


def paper_table() -> Table:
    rows = [[model, *(f"{figure:.1f}" for figure in figures)] for model, figures in PAPER.items()]
    header = ["paper: ImageNet-1K top-1, %", "B/16", "L/16"]
    return Table([header, *rows])


def report(scale: Scale, results: Results) -> Findings:
    found = arms(scale, results)
    scores = {key: percentages(arm, results) for key, arm in found.items()}
    leads = {i: scores[i, EQUAL].mean - scores[i, VIT].mean for i in TITLES}
    more = {i: scores[i, LARGER].mean - scores[i, EQUAL].mean for i in TITLES}
    compared = " and ".join(
        f"{scores[images, EQUAL].format(2)} % on {title} (ViT: {scores[images, VIT].format(2)} %)"
        for images, title in TITLES.items()
    )
    tokens = MODELS[LARGER].tokens / MODELS[EQUAL].tokens
    theirs = [ours - vit for ours, vit in zip(PAPER[EQUAL], PAPER[VIT], strict=True)]
    gains = [large - equal for large, equal in zip(PAPER[LARGER], PAPER[EQUAL], strict=True)]
    errors = {i: standard_error(scores[i, EQUAL].mean, TEST_IMAGES[i]) for i in TITLES}
    argument = (
        f"At equal parameters the TokenFormer reaches {compared}; the paper's leads are "
        f"{theirs[0]:+.1f} and {theirs[1]:+.1f} points. {tokens:.2f} times the tokens change that "
        "by "
        + " and ".join(f"{gain:+.2f}" for gain in more.values())
        + f" points (paper: {gains[0]:+.1f} and {gains[1]:+.1f})."
    )
    return Findings(
        verdict=verdict_of(scores),
        argument=argument,
        headline="TokenFormer over ViT: "
        + ", ".join(f"{leads[images]:+.1f} points on {title}" for images, title in TITLES.items())
        + f" (paper: {theirs[0]:+.1f} with B/16, {theirs[1]:+.1f} with L/16)",
        tables=[result_table(found, results), paper_table()],
        plots=[
            Plot(
                "image-classification.png",
                "Top-1 accuracy of a ViT and two TokenFormers on Fashion-MNIST and Tiny-ImageNet",
                partial(draw, scores),
            )
        ],
        notes=[
            "The claim holds if on no data set all seeds of the ViT are above all seeds of the "
            "TokenFormer of equal size. The ViT has the same blocks with matrices instead of "
            "Pattention: no biases, and norms without parameters. By the number of test images "
            "alone, the standard error of a run is "
            + " and ".join(f"{errors[i]:.2f} points on {title}" for i, title in TITLES.items())
            + ".",
        ],
    )


def draw(scores: Scores, path: Path) -> None:
    figure, panels = new_figure(9, 2.4, columns=len(TITLES))
    for axes, (images, title) in zip(panels, TITLES.items(), strict=True):
        dots = {model: scores[images, model].values for model in MODELS}
        put_dots(axes, dots, [EQUAL, LARGER])
        axes.locator_params(axis="x", nbins=6)
        label(axes, "top-1 on test images, %", title=title)
    panels[1].set_yticklabels([])
    save(figure, path)


EXHIBIT = Exhibit(
    title="Image classification",
    source="Table 2",
    claim="TokenFormer classifies images as well as a Vision Transformer of equal size: on "
    "ImageNet-1K 82.1 against 82.3 % with B/16 and 83.0 against 82.6 % with L/16.",
    setting="Four layers of width 64; 48 attention and 192 feed-forward tokens match the ViT, the "
    "larger TokenFormer has 64 and 256. Fashion-MNIST in 7 x 7 patches, "
    f"{ImageRun().steps[0]:,} steps of {ImageRun().batch} images; Tiny-ImageNet (24,000 images of "
    f"64 x 64 pixels, 200 classes) in 8 x 8 patches, {TINY_STEPS:,} steps of {TINY_BATCH}. Random "
    "flips, AdamW, the rate law for TokenFormers. Every row has a sweep of three learning rates, "
    "extended if the lowest or highest is best; they are chosen on a twentieth of the training "
    "images, and the test images are classified once, after the last step.",
    plan=plan,
    report=report,
    arms=costs,
)
