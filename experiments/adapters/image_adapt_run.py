"""The job that adapts a classifier of Tiny-ImageNet to Fashion-MNIST, with a new classifier."""

import shutil
from dataclasses import dataclass, replace
from typing import Any

from experiments.adapters.adapt_run import Method
from experiments.job import Job, Result
from experiments.vision import ImageModel, ImageRun
from experiments.workspace import Workspace

BASE = ImageRun(
    ImageModel(patch=8), (5000,), images="tiny-imagenet", batch=32, rate=4e-3, validations=5
)
TEST_IMAGES = 2000


@dataclass(frozen=True)
class ImageAdaptRun(Job):
    method: Method
    rate: float = 1e-3
    start: ImageRun = BASE
    images: str = "fashion-mnist"
    steps: int = 400
    batch: int = 32
    warmup: int = 40
    seed: int = 0

    @property
    def needs(self) -> tuple[Job, ...]:
        return (self.start,)

    @property
    def data(self) -> tuple[str, ...]:
        return (self.images, self.start.images)

    @property
    def flops(self) -> float:
        return self.steps * self.batch * self.start.model.training_flops(self.start.images)

    def reduced(self) -> "ImageAdaptRun":
        return replace(self, start=self.start.reduced(), steps=2, batch=4, warmup=1)

    def with_seed(self, seed: int) -> "ImageAdaptRun":
        return replace(self, seed=seed)

    def recipe(self, workspace: Workspace) -> Any:
        from tokenformer.train.options import OptimizerOptions, Recipe, ScheduleOptions

        recipe = Recipe(
            optimizer=OptimizerOptions(self.rate, weight_decay=0.0),
            schedule=ScheduleOptions("cosine", self.warmup, floor=0.1),
            adapter=self.method.options(),
        )
        recipe.model.start_from = str(workspace.model(self.start))
        recipe.data.images = workspace.images(self.images)
        recipe.augmentation.flip = True
        run = recipe.run
        run.steps, run.batch_size, run.seed, run.threads = self.steps, self.batch, self.seed, 1
        run.validate_every, run.validation_sequences = self.steps, TEST_IMAGES
        run.log_to, run.on_spike = [], "skip"
        run.checkpoint_every, run.keep_last = self.steps, 1
        return recipe

    def run(self, workspace: Workspace) -> Result:
        from tokenformer.train.metrics import read_metrics
        from tokenformer.train.run import Run
        from tokenformer.train.workload import make_workload

        recipe, folder = self.recipe(workspace), workspace.work(self)
        workload = make_workload(recipe)
        run = Run(folder, recipe, workload, lambda line: None)
        run.train(lambda row: None)
        rows = read_metrics(folder / "metrics.jsonl")
        last = [row for row in rows if "val_accuracy" in row][-1]
        model = run.loop.task.model
        result = {
            "accuracy": round(last["val_accuracy"], 5),
            "loss": round(last["val_loss"], 5),
            "trained_parameters": workload.trained_parameters(model),  # type: ignore[attr-defined]
            "seconds": round(rows[-1]["seconds"], 1),
            **self.measure_kept(model, workspace),
        }
        shutil.rmtree(folder)
        return result

    def measure_kept(self, model: Any, workspace: Workspace) -> Result:
        """Classify the images of the base, before and after, with the base's own classifier."""
        import torch

        from tokenformer import TokenformerForImageClassification
        from tokenformer.data.image_sources import load_images
        from tokenformer.evaluate.classification import measure_accuracy
        from tokenformer.models.image_processing import TokenformerImageProcessor

        folder = workspace.model(self.start)
        base = TokenformerForImageClassification.from_pretrained(folder).eval()
        processor = TokenformerImageProcessor.from_pretrained(folder)
        images = load_images(workspace.images(self.start.images)).held_out
        assert images is not None
        model.eval()
        model.classifier, model.config = base.classifier, base.config
        with torch.no_grad():
            measured = [
                measure_accuracy(part, processor, images, limit=TEST_IMAGES)
                for part in (base, model)
            ]
        return {
            "kept_loss": [round(found.loss, 5) for found in measured],
            "kept_accuracy": [round(found.top_1, 5) for found in measured],
        }
