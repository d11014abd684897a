"""Writing a Hugging Face folder from tensors: configuration, weights, and the preprocessor."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tokenformer.models.model_classes import build_on_meta
from tokenformer.train.checkpoint.tensors import storable

MAX_SHARD_SIZE = "2GB"


def write_folder(
    config: Any, tensors: Mapping[str, Tensor], preprocessor: Any | None, out: Path
) -> None:
    """Write a model folder. Memory-mapped tensors are copied from file to file. The preprocessor is
    a tokenizer or an image processor."""
    dtype = next(iter(tensors.values())).dtype
    model = build_on_meta(config).to(dtype)
    model.save_pretrained(
        out, state_dict=storable(tensors, copy=False), max_shard_size=MAX_SHARD_SIZE
    )
    if preprocessor is not None:
        preprocessor.save_pretrained(out)
