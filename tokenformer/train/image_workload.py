"""The data and models of an image recipe."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokenformer.data.image_batches import ImageReader
from tokenformer.data.image_sources import all_splits, load_images
from tokenformer.data.images import ImageSet
from tokenformer.errors import DataError
from tokenformer.models.configuration import (
    TokenformerVisionConfig,
    TransformerVisionConfig,
    VisionConfig,
)
from tokenformer.models.image_processing import TokenformerImageProcessor
from tokenformer.models.loading import load_for_training
from tokenformer.models.model_classes import MODEL_CLASSES, build_on_meta
from tokenformer.models.seeds import named_seed
from tokenformer.models.vision import VisionModelForImageClassification
from tokenformer.train.export import export
from tokenformer.train.image_task import ImageTask
from tokenformer.train.options import Recipe
from tokenformer.train.recipe_inputs import new_config
from tokenformer.train.run_record import MODEL

HEAD = "classifier"
IMAGE_FAMILIES: dict[str, type[Any]] = {
    "tokenformer": TokenformerVisionConfig,
    "transformer": TransformerVisionConfig,
}


class ImageWorkload:
    """Images, and the models and tasks that a run trains on them."""

    unit = "images"
    export_name = MODEL
    unfrozen: tuple[str, ...] = ()
    """Modules that train with any adapter: a classifier of other classes than the base's."""

    def __init__(self, recipe: Recipe) -> None:
        data = recipe.data
        if data.images is None:
            raise ValueError("data.images is missing; name a folder of images, or digits")
        if data.corpus is not None:
            raise ValueError(
                f"data.images={data.images} and data.corpus={data.corpus} cannot both be trained on"
            )
        self.recipe = recipe
        self.train: ImageSet
        self.held_out: ImageSet | None = None
        if recipe.run.validate_every == 0 and data.held_out_share == 0:
            found = all_splits(data.images, data.on_corrupt)
            if "train" not in found:
                raise DataError(f"{data.images} has no split train; it has {', '.join(found)}")
            self.train = found["train"]
        else:
            splits = load_images(
                data.images, held_out_share=data.held_out_share, on_corrupt=data.on_corrupt
            )
            self.train, self.held_out = splits.train, splits.held_out
        self.classes = self.train.classes

    def first_model(self) -> VisionModelForImageClassification:
        """Return the initial model: on the meta device, or loaded from `start_from`."""
        options = self.recipe.model
        config_class = IMAGE_FAMILIES[options.family]
        if options.start_from is not None:
            return self.load(options.start_from, MODEL_CLASSES[config_class])
        for name in ("num_labels", "num_classes"):
            wanted = options.options.get(name, len(self.classes))
            if wanted != len(self.classes):
                raise ValueError(
                    f"model.options.{name}={wanted}, but the images have {len(self.classes)} "
                    "classes; leave it out"
                )
        native: dict[str, Any] = {}
        if options.preset is None:
            height, width, channels = self.train.picture(0)[0].shape
            native = {"image_size": min(height, width), "num_channels": channels}
        return build_on_meta(new_config(options, config_class, **native, **self.class_names))

    @property
    def class_names(self) -> dict[str, Any]:
        """The classes as configuration options."""
        return {
            "num_labels": len(self.classes),
            "id2label": dict(enumerate(self.classes)),
            "label2id": {name: index for index, name in enumerate(self.classes)},
        }

    def load(self, folder: str, model_class: Any) -> VisionModelForImageClassification:
        """Load a trained model and give it the class names of these images."""
        model = load_for_training(model_class, folder)
        if model.config.num_labels != len(self.classes):
            raise ValueError(
                f"model.start_from={folder} has {model.config.num_labels} classes, the images "
                f"have {len(self.classes)}"
            )
        model.config.update(self.class_names)
        return model

    def token_batches(self) -> None:
        """There is no text to learn growth on."""

    def saved_model(self, state: dict[str, Any]) -> VisionModelForImageClassification:
        """Return the model of a checkpoint, on the meta device."""
        model = build_on_meta(state["config"])
        assert isinstance(model, VisionModelForImageClassification)
        return model

    def state(self) -> dict[str, Any]:
        return {}

    def notes(self, model: VisionModelForImageClassification) -> list[str]:
        return []

    def load_base(self, folder: str, family: str, seed: int) -> VisionModelForImageClassification:
        """Load a model to adapt. If its classes are others than those of these images, the head is
        trained too; if there are more or fewer, it is a new one."""
        model_class: Any = MODEL_CLASSES[IMAGE_FAMILIES[family]]
        model: VisionModelForImageClassification = load_for_training(model_class, folder)
        before = [model.config.id2label[index] for index in range(model.config.num_labels)]
        if before != list(self.classes):
            self.unfrozen = (HEAD,)
        if len(before) != len(self.classes):
            model.classifier = nn.Linear(model.config.hidden_size, len(self.classes))
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(named_seed(seed, HEAD))
                model._init_weights(model.classifier)
        model.config.update(self.class_names)
        return model

    def inputs(self, model: VisionModelForImageClassification, count: int) -> list[Tensor]:
        """Return the pixels of at most `count` training images, [1, C, H, W] each."""
        batches = self.reader(self.train, model).held_out(1, count)
        return [batch.to("cpu").pixels for batch in batches]

    def export(self, model: VisionModelForImageClassification, folder: Path) -> None:
        export(model, self.preprocessor(model), folder)

    def preprocessor(self, model: VisionModelForImageClassification) -> TokenformerImageProcessor:
        """Return the image processor to export with the model."""
        config: VisionConfig = model.config
        return TokenformerImageProcessor.for_size(
            config.image_size, config.num_channels, crop_share=self.recipe.data.crop_share
        )

    def task(self, model: VisionModelForImageClassification) -> ImageTask:
        if model.config.num_labels < len(self.classes):
            raise DataError(
                f"the model has {model.config.num_labels} classes, the images have "
                f"{len(self.classes)}"
            )
        return ImageTask(
            model,
            self.reader(self.train, model),
            None if self.held_out is None else self.reader(self.held_out, model),
            augmentation=self.recipe.augmentation,
            seed=self.recipe.run.seed,
        )

    def reader(self, pictures: ImageSet, model: VisionModelForImageClassification) -> ImageReader:
        return ImageReader(
            pictures,
            self.preprocessor(model),
            model.config.num_labels,
            self.recipe.data.workers,
        )
