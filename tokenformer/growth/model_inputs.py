"""Inputs of a model, token ids or images: random ones for probes, and checks of given ones."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

SEQUENCES, LENGTH = 2, 64
IMAGES = 4

INPUT_KINDS = {"input_ids": "token ids [B, T]", "pixel_values": "images [B, C, H, W]"}
"""By the model's `main_input_name`."""


def random_batch(model: PreTrainedModel, seed: int) -> Tensor:
    """Return random token ids or images that fit the model."""
    generator = torch.Generator().manual_seed(seed)
    if model.main_input_name == "pixel_values":
        return random_images(model, model.config, IMAGES, generator)
    return random_text(model, min(LENGTH, model.config.max_position_embeddings), generator)


def random_image_text(model: PreTrainedModel, seed: int) -> dict[str, Tensor] | None:
    """Return random images, each before random text, that fit a vision-language model; None if its
    context has no room for text after an image."""
    config = model.config
    vision = config.vision_config
    size = vision.class_tokens + (vision.image_size // vision.patch_size) ** 2
    length = min(LENGTH, config.max_position_embeddings - size)
    if length < 1:
        return None
    generator = torch.Generator().manual_seed(seed)
    text = random_text(model, length, generator)
    places = text.new_full((SEQUENCES, size), config.image_token_id)
    return {
        "input_ids": torch.cat([places, text], 1),
        "pixel_values": random_images(model, vision, SEQUENCES, generator),
    }


def random_text(model: PreTrainedModel, length: int, generator: torch.Generator) -> Tensor:
    tokens = torch.randint(model.config.vocab_size, (SEQUENCES, length), generator=generator)
    marker = getattr(model.config, "image_token_id", None)
    if marker is not None:  # of an image, which is not there
        tokens[tokens == marker] = (marker + 1) % model.config.vocab_size
    return tokens.to(model.device)


def random_images(
    model: PreTrainedModel, config: Any, count: int, generator: torch.Generator
) -> Tensor:
    shape = (count, config.num_channels, config.image_size, config.image_size)
    return torch.randn(shape, generator=generator).to(model.device, model.dtype)


def run_model(model: PreTrainedModel, batch: Any) -> Any:
    """Return the output of a model, with or without its head, on a batch of its main input, or of
    several inputs by name."""
    if isinstance(batch, Mapping):
        return model(**batch, use_cache=False)
    options = {} if model.main_input_name == "pixel_values" else {"use_cache": False}
    return model(**{model.main_input_name: batch}, **options)


def to_device(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Mapping):
        return {name: tensor.to(device) for name, tensor in batch.items()}
    return batch.to(device)


def check_batch(model: PreTrainedModel, batch: Any) -> None:
    """Raise ValueError unless `batch` has the rank and dtype of the model's main input; one of a
    vision-language model may have several inputs."""
    if isinstance(batch, Mapping) and "image" in model.input_modalities and "input_ids" in batch:
        batch = batch["input_ids"]
    images = model.main_input_name == "pixel_values"
    if (
        not isinstance(batch, Tensor)
        or batch.ndim != (4 if images else 2)
        or batch.is_floating_point() != images
    ):
        given = tuple(batch.shape) if isinstance(batch, Tensor) else type(batch).__name__
        raise ValueError(f"batches must be {INPUT_KINDS[model.main_input_name]}, got {given}")
