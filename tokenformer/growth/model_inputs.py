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
    config = model.config
    generator = torch.Generator().manual_seed(seed)
    if model.main_input_name == "pixel_values":
        shape = (IMAGES, config.num_channels, config.image_size, config.image_size)
        return torch.randn(shape, generator=generator).to(model.device, model.dtype)
    length = min(LENGTH, config.max_position_embeddings)
    tokens = torch.randint(config.vocab_size, (SEQUENCES, length), generator=generator)
    return tokens.to(model.device)


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
