"""The image processor that belongs to a classifier of a training run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tokenformer.models.configuration import VisionConfig
from tokenformer.models.image_processing import TokenformerImageProcessor
from tokenformer.train.recipe import CONFIG

PROCESSOR = "preprocessor_config.json"


@dataclass(frozen=True)
class FoundImageProcessor:
    processor: Any
    origin: str


def find_image_processor(model: Path, run: Path, config: VisionConfig) -> FoundImageProcessor:
    """That of the run's own export, the folder `model`, or as the run's recipe makes it; away from
    a run, one for images of the model's size."""
    if (model / PROCESSOR).exists():
        processor = TokenformerImageProcessor.from_pretrained(model)
        return FoundImageProcessor(processor, str(model / PROCESSOR))
    crop_share, origin = 1.0, "the model's image size"
    try:
        recipe = yaml.safe_load((run / CONFIG).read_text(encoding="utf-8"))
        crop_share, origin = recipe["data"]["crop_share"], str(run / CONFIG)
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        pass
    processor = TokenformerImageProcessor.for_size(
        config.image_size, config.num_channels, crop_share=crop_share
    )
    return FoundImageProcessor(processor, origin)
