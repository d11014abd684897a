"""Sample batches for commands that measure a model: from a prepared corpus or from images."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenformer.errors import InputError
from tokenformer.paths import exists, expand_user, is_local, missing_message

if TYPE_CHECKING:
    from torch import Tensor

BATCH_SIZE = 8
LONGEST = 512


def check_samples(data: Path | None = None, images: str | None = None) -> None:
    """Raise `InputError` for a path that does not exist."""
    if data is not None and not exists(expand_user(data)):
        raise InputError(f"--data: {missing_message(data)}")
    if images is not None and is_local(images) and not exists(expand_user(images)):
        raise InputError(f"--images: {missing_message(images)}")


def read_samples(
    data: Path, *, split: str, sequences: int, length: int, vocab_size: int
) -> "list[Tensor]":
    """Return batches of token ids [B, T], from sequences spread over a split."""
    import torch

    from tokenformer.data.batches import fixed_batches
    from tokenformer.data.corpus import open_corpus

    corpus = open_corpus(data, None, vocab_size)
    found = fixed_batches(corpus.split(split), batch_size=1, length=length, count=sequences)
    return list(torch.cat(found)[:, :-1].split(BATCH_SIZE))


def read_image_samples(source: str, folder: Path, model: Any, *, count: int) -> "list[Tensor]":
    """Return batches of pixels [B, C, H, W], from images spread over the training split,
    prepared by the model's image processor."""
    from transformers import AutoImageProcessor

    from tokenformer.data.image_batches import ImageReader
    from tokenformer.data.image_sources import load_images

    try:
        processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        line = str(error).strip().partition("\n")[0]
        raise InputError(f"the image processor of {folder} cannot be loaded: {line}") from None
    reader = ImageReader(load_images(source).train, processor, model.config.num_labels)
    batches = reader.held_out(BATCH_SIZE, count)
    return [batch.to("cpu").pixels.to(model.dtype) for batch in batches]
