"""Sample batches for commands that measure a model: from a prepared corpus or from images."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenformer.errors import DataError, InputError
from tokenformer.paths import exists, expand_user, is_local, missing_message

if TYPE_CHECKING:
    from torch import Tensor

BATCH_SIZE = 8
LONGEST = 512


def check_samples(
    data: Path | None = None, images: str | None = None, image_text: str | None = None
) -> None:
    """Raise `InputError` for a path that does not exist."""
    if data is not None and not exists(expand_user(data)):
        raise InputError(f"--data: {missing_message(data)}")
    for option, name in (("images", images), ("image_text", image_text)):
        if name is not None and is_local(name) and not exists(expand_user(name)):
            raise InputError(f"--{option}: {missing_message(name)}")


@dataclass(frozen=True)
class Samples:
    """Batches of samples that are read when they are used, so that any number fits in memory."""

    count: int
    """Samples, not batches."""
    read: "Callable[[list[int]], Tensor]"
    """Reads samples by number."""
    title: str
    """What they are of: a corpus and its split."""

    def __len__(self) -> int:
        return -(-self.count // BATCH_SIZE)

    def __iter__(self) -> "Iterator[Tensor]":
        for first in range(0, self.count, BATCH_SIZE):
            yield self.read(list(range(first, min(first + BATCH_SIZE, self.count))))


def text_samples(
    data: Path, *, split: str, sequences: int, length: int, vocab_size: int
) -> Samples:
    """Return token ids [B, T] of at most so many sequences, spread over a split."""
    from tokenformer.data.batches import segments
    from tokenformer.data.corpus import open_corpus
    from tokenformer.data.order import check_length, validation_starts
    from tokenformer.models.model_card import public_name

    tokens = open_corpus(data, None, vocab_size).split(split)
    check_length(len(tokens), length, str(tokens))
    starts = validation_starts(len(tokens), length, count=sequences)

    def read(numbers: list[int]) -> "Tensor":
        return segments(tokens, starts[numbers], length)[:, :-1].contiguous()

    return Samples(len(starts), read, f"{public_name(data)}, {split}")


def image_samples(
    source: str, folder: Path, model: Any, *, count: int, split: str | None = None
) -> Samples:
    """Return pixels [B, C, H, W] of at most so many images, spread over a split, by default the
    held-out one, and prepared by the model's image processor."""
    from transformers import AutoImageProcessor

    from tokenformer.data.image_batches import ImageReader
    from tokenformer.data.image_sources import HELD_OUT, image_splits
    from tokenformer.models.model_card import public_name

    try:
        processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        line = str(error).strip().partition("\n")[0]
        raise InputError(f"the image processor of {folder} cannot be loaded: {line}") from None
    splits = image_splits(source)
    if split is None:
        split = next(name for name in (*HELD_OUT, *splits) if name in splits)
    if split not in splits:
        raise DataError(f"{source} has no split {split!r}; it has {', '.join(splits)}")
    reader = ImageReader(splits[split], processor, model.config.num_labels)
    indices = [index for batch in reader.held_out(BATCH_SIZE, count) for index in batch.indices]

    def read(numbers: list[int]) -> "Tensor":
        return reader.plain_batch([indices[n] for n in numbers]).pixels.to(model.dtype)

    return Samples(len(indices), read, f"{public_name(source)}, {split}")


def read_samples(
    data: Path, *, split: str, sequences: int, length: int, vocab_size: int
) -> "list[Tensor]":
    """Return all batches of `text_samples`."""
    found = text_samples(
        data, split=split, sequences=sequences, length=length, vocab_size=vocab_size
    )
    return list(found)


def read_image_samples(source: str, folder: Path, model: Any, *, count: int) -> "list[Tensor]":
    """Return all batches of `image_samples` from the training split."""
    return list(image_samples(source, folder, model, count=count, split="train"))


def read_image_text_samples(
    source: str, folder: Path, model: Any, *, count: int, length: int, on_corrupt: str = "refuse"
) -> "list[dict[str, Tensor]]":
    """Return images with text as inputs of a vision-language model, from samples spread over the
    training split, one sample a batch: padding would be measured as text."""
    from tokenformer.data.image_text_batches import ImageTextEncoder, ImageTextReader
    from tokenformer.data.image_text_sources import load_image_text
    from tokenformer.train.image_text_workload import load_processor

    context = model.config.max_position_embeddings
    encoder = ImageTextEncoder(load_processor(str(folder)), length, context)
    reader = ImageTextReader(load_image_text(source, on_corrupt=on_corrupt).train, encoder)
    found = []
    for batch in reader.held_out(1, count):
        read = batch.to("cpu")
        pixels = {} if read.pixels is None else {"pixel_values": read.pixels}
        found.append({"input_ids": read.ids, **pixels})
    return found
