"""What a model takes, token ids or images: drawn for a probe, or checked where it is data."""

from typing import Any

import torch
from torch import Tensor

SEQUENCES, LENGTH = 2, 64
IMAGES = 4

KINDS = {"input_ids": "token ids [B, T]", "pixel_values": "images [B, C, H, W]"}
"""By the name of a model's main input."""


def random_batch(model: Any, seed: int) -> Tensor:
    config = model.config
    generator = torch.Generator().manual_seed(seed)
    if model.main_input_name == "pixel_values":
        shape = (IMAGES, config.num_channels, config.image_size, config.image_size)
        return torch.randn(shape, generator=generator).to(model.device, model.dtype)
    length = min(LENGTH, config.max_position_embeddings)
    tokens = torch.randint(config.vocab_size, (SEQUENCES, length), generator=generator)
    return tokens.to(model.device)


def run(model: Any, batch: Tensor) -> Any:
    """The output of a model, with or without its head, on a batch of what it takes."""
    options = {} if model.main_input_name == "pixel_values" else {"use_cache": False}
    return model(**{model.main_input_name: batch}, **options)


def check_batch(model: Any, batch: Any) -> None:
    images = model.main_input_name == "pixel_values"
    if (
        not isinstance(batch, Tensor)
        or batch.ndim != (4 if images else 2)
        or batch.is_floating_point() != images
    ):
        given = tuple(batch.shape) if isinstance(batch, Tensor) else type(batch).__name__
        raise ValueError(f"batches must be of {KINDS[model.main_input_name]}, got {given}")
