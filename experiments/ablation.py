"""An ablation: one option of the model with several values, on images and on text.

    ablation = Ablation("theta", {"l2_gelu": "GELU + L2", "softmax": "exp + L1"})
    ablation.plan(scale, results)                   # the jobs of both
    found = ablation.found(scale, results)
    found.score("images", "softmax")                # top-1 in percent, of every seed

Every value has a sweep of learning rates of its own. The value that is the default of the models is
the base run, which exhibits share.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from experiments.exhibit import Arms, Scale, Table
from experiments.job import Job, Results, Summary
from experiments.language import LanguageRun, Model
from experiments.plots import label, new_figure, put_dots, save
from experiments.sweep import Arm, tune
from experiments.vision import ImageModel, ImageRun, percentages, tune_images

STEPS = 532
"""On text: 1.5e12 FLOPs, as in the growth study."""
RATES = (4e-3, 8e-3, 1.6e-2)
PAPER_RECIPE = "vision/tokenformer-base"


class Setting(NamedTuple):
    title: str
    figure: str
    digits: int


SETTINGS = {
    "images": Setting("Fashion-MNIST", "top-1, %", 2),
    "text": Setting("enwik8", "bits per byte", 3),
}
SETTING = (
    "On images: Fashion-MNIST in 7 x 7 patches, four layers, width 64, 48 attention and 192 "
    f"feed-forward tokens, {ImageRun().steps[0]:,} steps of {ImageRun().batch} images; learning "
    "rates are chosen on a twentieth of the training images. On text: bytes of enwik8, two layers, "
    f"width 128, 32 and 128 tokens, {STEPS} steps of 2,048 bytes; learning rates are chosen on the "
    "held-out text that is reported. Every row has a sweep of three learning rates, extended if "
    "the lowest or highest is best, and three seeds at the best one."
)


@dataclass(frozen=True)
class Ablation:
    option: str
    """A field of both `Model` and `ImageModel`."""
    values: dict[str, str]
    """Values of the option, with their titles."""

    def arms(self, scale: Scale, results: Results) -> dict[tuple[str, str], Arm]:
        """Return the arms by setting and value."""
        found = {}
        for value in self.values:
            found["images", value] = tune_images(self.image_run(value), scale, results)
            found["text", value] = tune_text(self.text_model(value), scale, results)
        return found

    def image_run(self, value: str) -> ImageRun:
        return ImageRun(replace(ImageModel(), **{self.option: value}))

    def text_model(self, value: str) -> Model:
        return replace(Model(), **{self.option: value})

    def plan(self, scale: Scale, results: Results) -> list[Job]:
        if scale.name == "paper":
            return self.paper_plan()
        return [job for arm in self.arms(scale, results).values() for job in arm.jobs]

    def paper_plan(self) -> list[Job]:
        from experiments.cluster import RecipeRun

        jobs: list[Job] = []
        for value in self.values:
            if value == getattr(Model(), self.option):  # as in the recipe
                jobs.append(RecipeRun(PAPER_RECIPE))
            else:
                override = (f"model.options.{self.option}", value)
                jobs.append(RecipeRun(PAPER_RECIPE, (override,), value))
        return jobs

    def costs(self, scale: Scale, results: Results) -> Arms:
        arms = self.arms(scale, results)
        return {
            f"{SETTINGS[setting].title}: {self.values[value]}": arms[setting, value].runs[:1]
            for setting in SETTINGS
            for value in self.values
        }

    def found(self, scale: Scale, results: Results) -> "AblationResults":
        return AblationResults(self, self.arms(scale, results), results)


def tune_text(model: Model, scale: Scale, results: Results) -> Arm:
    def run_at(rate: float) -> LanguageRun:
        fitted: LanguageRun = scale.fit(LanguageRun(model, (STEPS,), rate=rate))
        return fitted

    return tune(run_at, RATES, scale, results)


@dataclass(frozen=True)
class AblationResults:
    ablation: Ablation
    arms: dict[tuple[str, str], Arm]
    results: Results

    def score(self, setting: str, value: str) -> Summary:
        arm = self.arms[setting, value]
        return percentages(arm, self.results) if setting == "images" else arm.summary(self.results)

    def better(self, setting: str, value: str, other: str) -> bool:
        """Whether every seed of a value is better than every seed of another."""
        ours, theirs = self.score(setting, value), self.score(setting, other)
        return ours.above(theirs) if setting == "images" else theirs.above(ours)

    def errors(self, setting: str, value: str) -> float:
        """The mean share of wrong images, or of bits that are left; lower is better."""
        mean = self.score(setting, value).mean
        return 100 - mean if setting == "images" else mean

    def format(self, setting: str, value: str) -> str:
        return self.score(setting, value).format(SETTINGS[setting].digits)

    def table(self, paper: dict[str, float]) -> Table:
        header = [f"`{self.ablation.option}`"]
        for title, figure, _ in SETTINGS.values():
            header += [f"{title}: {figure}", "learning rate"]
        rows = []
        for value, title in self.ablation.values.items():
            cells = [f"{title} (`{value}`)"]
            for setting in SETTINGS:
                rate = self.arms[setting, value].runs[0].rate
                cells += [self.format(setting, value), f"{rate:g}"]
            rows.append([*cells, f"{paper[value]:.1f}" if value in paper else ""])
        return Table([[*header, "paper: ImageNet-1K top-1, %"], *rows])

    def draw(self, ours: str, path: Path) -> None:
        """A panel per setting with a line per value; `ours` is the paper's choice."""
        titles = self.ablation.values
        figure, panels = new_figure(9, 0.34 * len(titles) + 1.4, columns=len(SETTINGS))
        for axes, (setting, (title, unit, _)) in zip(panels, SETTINGS.items(), strict=True):
            dots = {name: self.score(setting, value).values for value, name in titles.items()}
            put_dots(axes, dots, [titles[ours]])
            better = "lower is better" if setting == "text" else "higher is better"
            axes.locator_params(axis="x", nbins=6)
            label(axes, f"{unit} ({better})", title=title)
        panels[1].set_yticklabels([])
        save(figure, path)
