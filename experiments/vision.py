"""The job that trains an image classifier: from scratch, or growing in stages.

    base = ImageRun()                                      # TokenFormer on Fashion-MNIST
    vit = ImageRun(ImageModel("transformer"))              # equal parameters
    grown = ImageRun(ImageModel(tokens=24), (1400, 1000), (TokenGrowth(48),))

A twentieth of the training images is held out for the curve and for the choice of the learning
rate. The test images are classified once, after the last step.
"""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.exhibit import Scale
from experiments.job import Job, Result, Results, Summary
from experiments.language import TIMED_STEPS, first_loop, keep_model, token_sizes
from experiments.sweep import Arm, tune
from experiments.workspace import Workspace

if TYPE_CHECKING:
    from tokenformer.train.loop import Loop


class Images(NamedTuple):
    side: int
    channels: int
    classes: int


IMAGES = {
    "fashion-mnist": Images(28, 1, 10),
    "tiny-imagenet": Images(64, 3, 200),
    "digits": Images(8, 1, 10),
}
"""Shapes by name; digits stand in for the others at scale `smoke`."""
VALIDATION_SHARE = 0.05
"""Share of the training images on which learning rates are chosen."""
RATES = {"tokenformer": (2e-3, 4e-3, 8e-3), "transformer": (1e-3, 2e-3, 4e-3)}
"""The sweep of learning rates in all exhibits, with the rate law for a TokenFormer."""


@dataclass(frozen=True)
class ImageModel:
    family: str = "tokenformer"
    tokens: int = 48
    """Tokens of each attention projection; feed-forward layers have four times as many. A
    Transformer has exactly as many parameters as the TokenFormer with these tokens."""
    width: int = 64
    layers: int = 4
    heads: int = 4
    patch: int = 7
    theta: str = "l2_gelu"
    norm_parameters: str = "none"

    def options(self, images: str) -> dict[str, Any]:
        """Return the `model.options` of a recipe."""
        side, channels, _ = IMAGES[images]
        shape = {
            "image_size": side,
            "num_channels": channels,
            "patch_size": self.patch,
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "variant": "paper",
            "norm_parameters": self.norm_parameters,
        }
        if self.family == "tokenformer":
            return {**shape, "theta": self.theta, **token_sizes(self.tokens)}
        # 16 width tokens = 4 width^2 + 2 width units: the blocks of both, per layer.
        return {**shape, "intermediate_size": 8 * self.tokens - 2 * self.width}

    def config(self, images: str) -> Any:
        from tokenformer.train.image_workload import IMAGE_FAMILIES

        classes = IMAGES[images].classes
        return IMAGE_FAMILIES[self.family](num_labels=classes, **self.options(images))

    def parameters(self, images: str) -> int:
        from tokenformer.models.accounting import count_parameters

        return sum(count_parameters(self.config(images)).values())

    def training_flops(self, images: str) -> int:
        """FLOPs of one image, forward and backward."""
        from tokenformer.models.accounting import image_training_flops

        return sum(image_training_flops(self.config(images)).values())


@dataclass(frozen=True)
class TokenGrowth:
    to: int
    """Tokens of each attention projection."""
    init: str = "zero"


@dataclass(frozen=True)
class ImageRun(Job):
    model: ImageModel = ImageModel()
    steps: tuple[int, ...] = (2000,)
    """Steps of every stage."""
    growth: tuple[TokenGrowth, ...] = ()
    """How the model grows at the start of the second and each later stage."""
    images: str = "fashion-mnist"
    batch: int = 64
    rate: float = 4e-3
    rate_law: str = "tokens"
    weight_decay: float = 0.05
    warmup: int = 100
    decay: float = 0.5
    """Share of the last stage over which the learning rate falls linearly; it is constant before.
    """
    validations: int = 10
    """Validations in the last stage."""
    seed: int = 0

    @property
    def data(self) -> tuple[str, ...]:
        return (self.images,)

    @property
    def models(self) -> list[ImageModel]:
        """The model of every stage."""
        return [self.model, *(replace(self.model, tokens=growth.to) for growth in self.growth)]

    @property
    def flops(self) -> float:
        costs = [model.training_flops(self.images) for model in self.models]
        return sum(n * self.batch * cost for n, cost in zip(self.steps, costs, strict=True))

    def stages(self) -> "list[tuple[int, ImageRun]]":
        """Return the steps of every stage, with a run from scratch whose steps take as long."""
        return [
            (count, ImageRun(model, (TIMED_STEPS,), images=self.images, batch=self.batch))
            for count, model in zip(self.steps, self.models, strict=True)
        ]

    def loop(self, workspace: Workspace) -> "Loop":
        """Return the training loop of the first stage."""
        return first_loop(self.recipe(workspace))

    def reduced(self) -> "ImageRun":
        return replace(
            self,
            model=replace(self.model, patch=4),
            steps=tuple(2 for _ in self.steps),
            images="digits",
            batch=4,
            warmup=1,
            validations=2,
        )

    def with_seed(self, seed: int) -> "ImageRun":
        return replace(self, seed=seed)

    def recipe(self, workspace: Workspace) -> Any:
        from tokenformer.train.options import OptimizerOptions, Recipe, StageOptions

        recipe = Recipe(
            optimizer=OptimizerOptions(
                self.rate, weight_decay=self.weight_decay, rate_law=self.rate_law
            )
        )
        recipe.model.family = self.model.family
        recipe.model.options = self.model.options(self.images)
        recipe.data.images = workspace.images(self.images)
        recipe.augmentation.flip = True
        run = recipe.run
        run.batch_size, run.seed, run.threads = self.batch, self.seed, 1
        run.validate_every = max(1, self.steps[-1] // self.validations)
        run.validation_sequences = 10_000  # all that are held out
        run.log_to, run.on_spike = [], "skip"
        run.checkpoint_every, run.keep_last = 1000, 1  # and at the end of a stage
        for stage, count in enumerate(self.steps):
            options = StageOptions(count, schedule=self.stage_schedule(stage))
            if stage:
                options.grow = self.growth_options(self.growth[stage - 1])
            recipe.stages.append(options)
        return recipe

    def stage_schedule(self, stage: int) -> Any:
        from tokenformer.train.options import ScheduleOptions

        warmup = 0 if stage else self.warmup
        if stage < len(self.steps) - 1:
            return ScheduleOptions("constant", warmup)
        return ScheduleOptions("wsd", warmup, floor=0.01, decay=self.decay)

    def growth_options(self, growth: TokenGrowth) -> Any:
        from tokenformer.train.options import GrowthOptions

        init: Any = growth.init
        return GrowthOptions(sizes=token_sizes(growth.to), init=init, seed=self.seed)

    def run(self, workspace: Workspace) -> Result:
        from tokenformer.data.image_sources import split_set
        from tokenformer.evaluate.classification import measure_accuracy
        from tokenformer.train.image_workload import ImageWorkload
        from tokenformer.train.metrics import read_metrics
        from tokenformer.train.run import Run

        recipe, folder = self.recipe(workspace), workspace.work(self)
        workload = ImageWorkload(recipe)
        test, split = workload.held_out, split_set(workload.train, VALIDATION_SHARE)
        assert test is not None
        workload.train, workload.held_out = split.train, split.held_out
        run = Run(folder, recipe, workload, lambda line: None)
        run.train(lambda row: None)
        model = run.loop.task.model.eval()
        measured = measure_accuracy(model, workload.preprocessor(model), test)
        rows = read_metrics(folder / "metrics.jsonl")
        validated = [row for row in rows if "val_accuracy" in row]
        result = {
            "accuracy": measured.top_1,
            "top_5": measured.top_5,
            "loss": round(measured.loss, 5),
            "validation_loss": round(validated[-1]["val_loss"], 5),
            "parameters": model.num_parameters(),
            "flops": rows[-1]["flops"],
            "seconds": round(rows[-1]["seconds"], 1),
            "skipped": sum("problem" in row for row in rows),
            "curve": [[r["step"], r["flops"], round(r["val_accuracy"], 5)] for r in validated],
        }
        if self.growth:
            result |= self.growth_results(validated, folder)
        keep_model(run.exported, workspace.model(self))
        shutil.rmtree(folder)
        return result

    def growth_results(self, validated: list[dict[str, Any]], folder: Path) -> Result:
        """Return the validation accuracy at the end of every stage, and by how much the output of a
        layer changed at every growth, relative to its largest value."""
        ends = [sum(self.steps[: stage + 1]) for stage in range(len(self.steps))]
        reports = [folder / f"growth-{stage + 2}.json" for stage in range(len(self.growth))]
        changes = [json.loads(report.read_text())["max_layer_change"] for report in reports]
        accuracies = {row["step"]: round(row["val_accuracy"], 5) for row in validated}
        return {"stage_ends": [accuracies[end] for end in ends], "layer_changes": changes}


def tune_images(run: ImageRun, scale: Scale, results: Results) -> Arm:
    """Return `run` with the best learning rate, chosen on images that are not the test images."""

    def run_at(rate: float) -> ImageRun:
        fitted: ImageRun = scale.fit(replace(run, rate=rate))
        return fitted

    return tune(run_at, RATES[run.model.family], scale, results, "validation_loss")


def percentages(arm: Arm, results: Results, metric: str = "accuracy") -> Summary:
    return Summary(tuple(100 * share for share in arm.summary(results, metric).values))
