"""The job that joins a vision and a language model and trains the result on captions.

    CaptionRun("routed", "new", rate=4e-3)     # only the new tokens are trained
    CaptionRun("projector", "all")             # LLaVA's second stage: all but the encoder
    CaptionRun(images="other-images")          # without seeing: captions of other photographs
    CaptionRun(fresh=True)                     # the same model with fresh weights

Each run is an ordinary `tokenformer train`. It measures what the model gained from seeing, and what
it kept of the two that it was made of.
"""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.job import Job, Result
from experiments.language import LanguageRun, Model, keep_model
from experiments.vision import ImageModel, ImageRun
from experiments.workspace import Workspace

LAYERS, WIDTH, TOKENS = 4, 128, 64
NEW_TOKENS = 32
PROJECTOR = 20 * NEW_TOKENS
"""Hidden units of the projector: as many weights as the new tokens of the five layers of four
blocks."""
VISION = ImageRun(
    ImageModel(tokens=TOKENS, width=WIDTH, patch=8),
    (5000,),
    images="tiny-imagenet",
    batch=32,
    rate=4e-3,
    validations=5,
)
ENWIK8 = LanguageRun(
    Model(tokens=TOKENS, width=WIDTH, layers=LAYERS), (4000,), length=256, batch=8, validations=4
)
LANGUAGE = LanguageRun(
    start=ENWIK8,
    steps=(400,),
    corpus="captions",
    length=256,
    batch=8,
    rate=2e-3,
    remember="enwik8",
    validations=4,
)
MEASURED = "flickr8k"
"""The images and captions on which all runs are measured."""
TEXT_LENGTH = 96
"""Tokens of a caption; one in fifty is longer and is cut."""
MEAN_LENGTH = 57
"""Bytes of a caption with its end."""
TEN = 10
"""Images whose captions are shown."""
ALONE = 64
"""Sequences of enwik8 on which the language half is measured."""


@dataclass(frozen=True)
class CaptionRun(Job):
    mode: str = "routed"
    trained: str = "new"
    """new: the new tokens, or the projector; all: everything but a frozen encoder."""
    rate: float = 4e-3
    images: str = MEASURED
    """What it trains on."""
    fresh: bool = False
    steps: int = 400
    batch: int = 32
    warmup: int = 40
    new_tokens: int = NEW_TOKENS
    projector: int = PROJECTOR
    vision: ImageRun = VISION
    language: LanguageRun = LANGUAGE
    text_length: int = TEXT_LENGTH
    validations: int = 4
    validation_samples: int = 512
    measured: int = 100
    """Images that the captions are measured on."""
    seed: int = 0

    @property
    def needs(self) -> tuple[Job, ...]:
        return (self.vision, self.language)

    @property
    def data(self) -> tuple[str, ...]:
        return (self.images, MEASURED, self.vision.images, "enwik8")

    @property
    def flops(self) -> float:
        """About those of both halves; frozen weights have no gradients of their own."""
        image = self.vision.model.training_flops(self.vision.images)
        text = self.language.models[-1].training_flops(MEAN_LENGTH)
        forward_and_back = 1.0 if self.trained == "all" else 2 / 3
        if self.mode == "projector":
            both = image / 3 + forward_and_back * text * (1 + 65 / MEAN_LENGTH)
        else:
            both = forward_and_back * 1.3 * (image + text) * (2 if self.mode == "shared" else 1)
        return self.steps * self.batch * both

    def reduced(self) -> "CaptionRun":
        return replace(
            self,
            steps=2,
            batch=4,
            warmup=1,
            new_tokens=4,
            projector=80,
            vision=self.vision.reduced(),
            language=self.language.reduced(),
            text_length=16,
            validations=1,
            validation_samples=4,
            measured=12,
        )

    def with_seed(self, seed: int) -> "CaptionRun":
        """Return the run of another seed, on the same two models."""
        return replace(self, seed=seed)

    def recipe(self, workspace: Workspace, start_from: Path) -> Any:
        return image_text_recipe(
            self, start_from, workspace.image_text(self.images), self.validation_samples
        )

    def run(self, workspace: Workspace) -> Result:
        folder = workspace.work(self)
        joined, trained = folder / "joined", folder / "run"
        if not joined.exists():
            self.join(workspace, joined)
        recipe = self.recipe(workspace, joined)
        run = train(recipe, trained)
        model, processor = run.loop.task.model.eval(), load_processor(run.exported)
        result = {
            **losses_of(run),
            "trained_parameters": trained_parameters(model, self.trained),
            **self.measure_captions(model, processor, workspace),
            **self.measure_kept(model, workspace),
        }
        keep_model(run.exported, workspace.model(self))
        shutil.rmtree(folder)
        return result

    def join(self, workspace: Workspace, folder: Path) -> None:
        """Write the joint model, with fresh weights if asked for."""
        import torch

        from tokenformer.cli.join import join_folders
        from tokenformer.models.loading import load_tokenformer

        partial = folder.with_name("joined-partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        join_folders(
            workspace.model(self.vision),
            workspace.model(self.language),
            partial,
            mode=self.mode,
            new_tokens=self.new_tokens,
            projector_size=self.projector,
            seed=self.seed,
        )
        if self.fresh:
            model = load_tokenformer(partial)
            torch.manual_seed(self.seed)
            type(model)(model.config).save_pretrained(partial)
        partial.rename(folder)

    def measure_captions(self, model: Any, processor: Any, workspace: Workspace) -> Result:
        """Measure captions of held-out images; ten of them are kept, by the row of their image."""
        import random

        from tokenformer.data.image_text_sources import load_captions
        from tokenformer.evaluate.captions import measure_captions

        images, _ = load_captions(str(workspace.image_text(MEASURED)))
        found = measure_captions(model, processor, images, limit=self.measured).asdict()
        written = found.pop("generated")
        assert len(written) == self.measured, "a row is an image"
        rows = sorted(random.Random(0).sample(range(self.measured), TEN))
        shown = {str(row): [written[row], images.captions(row)[0]] for row in rows}
        return rounded(found) | {"shown": shown}

    def measure_kept(self, model: Any, workspace: Workspace) -> Result:
        """Return the loss on enwik8 of the text half, and the accuracy on the images of the vision
        model with its classifier, before and after."""
        from tokenformer.models.loading import load_tokenformer

        language = load_tokenformer(workspace.model(self.language)).eval()
        classifier = load_tokenformer(workspace.model(self.vision)).eval()
        images, text = vision_measure(self, workspace), text_measure(workspace)
        before = [images(classifier), text(language)]
        classifier.model = features_of(model)
        after = [images(classifier), text(model)]
        kept = zip(("kept_accuracy", "kept_bits_per_byte"), before, after, strict=True)
        return {name: [round(a, 5), round(b, 5)] for name, a, b in kept}


def image_text_recipe(job: Any, start_from: Path, images: Path, validated: int) -> Any:
    """Return the recipe of a job that trains a joint model."""
    from tokenformer.train.options import OptimizerOptions, Recipe, ScheduleOptions

    optimizer = OptimizerOptions(job.rate, weight_decay=0.0)
    if job.trained == "new":
        if job.mode == "projector":
            optimizer.rates = {"*": 0.0, "model.images.projector.*": 1.0}
        else:
            optimizer.rates = {"*": 0.0, "*_tokens": 1.0}
            optimizer.part_rates = {"vision": 0.0, "language": 0.0}
    recipe = Recipe(optimizer=optimizer, schedule=ScheduleOptions("cosine", job.warmup, floor=0.05))
    recipe.model.start_from = str(start_from)
    recipe.data.image_text, recipe.data.length = str(images), job.text_length
    run = recipe.run
    run.steps, run.batch_size, run.seed, run.threads = job.steps, job.batch, job.seed, 1
    run.validate_every = max(1, job.steps // job.validations)
    run.validation_sequences = validated
    run.log_to, run.on_spike = [], "skip"
    run.checkpoint_every, run.keep_last = job.steps, 1
    return recipe


def train(recipe: Any, folder: Path) -> Any:
    from tokenformer.train.run import Run
    from tokenformer.train.workload import make_workload

    run = Run(folder, recipe, make_workload(recipe), lambda line: None)
    run.train(lambda row: None)
    return run


def losses_of(run: Any) -> Result:
    from tokenformer.train.metrics import read_metrics

    rows = read_metrics(run.folder / "metrics.jsonl")
    curve = [[row["step"], round(row["val_bpb"], 5)] for row in rows if "val_bpb" in row]
    return {
        "loss": round([row for row in rows if "val_loss" in row][-1]["val_loss"], 5),
        "parameters": run.loop.task.model.num_parameters(),
        "flops": rows[-1]["flops"],
        "seconds": round(rows[-1]["seconds"], 1),
        "skipped": sum("problem" in row for row in rows),
        "curve": curve,
    }


def trained_parameters(model: Any, trained: str) -> int:
    from tokenformer.growth.tokens.token_set import token_layers

    joined = model.config.is_joined
    if trained == "all":
        encoder = 0 if joined else sum(p.numel() for p in model.model.images.encoder.parameters())
        return int(model.num_parameters() - encoder)
    if not joined:
        return sum(p.numel() for p in model.model.images.projector.parameters())
    return sum(
        model.config.parts(*place)[1] * (layer.in_features + layer.out_features)
        for place, layer in token_layers(model).values()
    )


def load_processor(folder: Path) -> Any:
    from tokenformer import TokenformerProcessor

    return TokenformerProcessor.from_pretrained(str(folder))


def rounded(found: Result) -> Result:
    return {
        name: round(value, 5) if isinstance(value, float) else value
        for name, value in found.items()
    }


def vision_measure(job: CaptionRun, workspace: Workspace) -> Callable[[Any], float]:
    """Return what measures the accuracy of a classifier on the images of the vision model."""
    from tokenformer.data.image_sources import load_images
    from tokenformer.evaluate.classification import measure_accuracy
    from tokenformer.models.image_processing import TokenformerImageProcessor

    processor = TokenformerImageProcessor.from_pretrained(workspace.model(job.vision))
    images = load_images(workspace.images(job.vision.images)).held_out
    assert images is not None
    return lambda model: measure_accuracy(model, processor, images).top_1


def text_measure(workspace: Workspace) -> Callable[[Any], float]:
    """Return what measures the bits per byte of a model on held-out text of enwik8."""
    import torch

    from tokenformer.data.batches import fixed_batches
    from tokenformer.data.corpus import Corpus

    tokens = Corpus(workspace.corpus("enwik8")).split("validation")
    batches = fixed_batches(tokens, batch_size=8, length=256, count=ALONE)

    @torch.no_grad()
    def measure(model: Any) -> float:
        losses = []
        for batch in batches:
            logits = model(batch[:, :-1]).logits
            losses.append(torch.nn.functional.cross_entropy(logits.mT, batch[:, 1:]))
        return float(sum(losses) / len(losses)) / math.log(2)

    return measure


def features_of(model: Any) -> Any:
    """Return a backbone of a classifier that computes the image features of a joint model."""
    from torch import Tensor, nn

    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.joint = model

        def forward(self, pixel_values: Tensor, **options: Any) -> Any:
            return self.joint.get_image_features(pixel_values)

    return Features()
