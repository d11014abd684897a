"""Batches of images with text, as token ids, labels and pixel values.

    encoder = ImageTextEncoder(processor, length=256)
    reader = ImageTextReader(samples, encoder)
    batch = reader.training_batch(first_sample=0, count=8, seed=0)

The order of the samples is a pure function of (seed, samples consumed); see `order`. A caption
follows its image and ends with the end of text. A conversation is written as by the processor's
chat template, and only what the assistant says has labels.
"""

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tokenformer.data.image_text import ASSISTANT, CAPTION, IMAGE_TOKEN, ImageText, Turn
from tokenformer.data.order import shuffled_indices
from tokenformer.models.image_text_processing import TokenformerProcessor

IGNORED = -100
"""The label of what the model does not learn to write."""


class ImageTextSamples(Protocol):
    def __len__(self) -> int: ...

    def sample(self, index: int) -> ImageText: ...


@dataclass(frozen=True)
class EncodedSample:
    ids: list[int]
    labels: list[int]
    pixels: list[np.ndarray]
    """The images, normalized, [C, H, W] each."""
    target_bytes: int
    """UTF-8 bytes of the text with labels, without what was cut off."""


@dataclass(frozen=True)
class ImageTextBatch:
    ids: Tensor  # [B, T], padded on the right
    labels: Tensor  # [B, T]
    pixels: Tensor | None  # [N, C, H, W], all images in the order of the text
    target_bytes: int

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device | str) -> "ImageTextBatch":
        pixels = None if self.pixels is None else self.pixels.to(device)
        return ImageTextBatch(
            self.ids.to(device), self.labels.to(device), pixels, self.target_bytes
        )


@dataclass(frozen=True)
class LazyImageTextBatch:
    """A batch that is read when it is moved to a device."""

    indices: list[int]
    read: Callable[[list[int]], ImageTextBatch]

    def __len__(self) -> int:
        return len(self.indices)

    def to(self, device: torch.device | str) -> ImageTextBatch:
        return self.read(self.indices).to(device)


class ImageTextEncoder:
    """Turns samples into ids, labels and normalized pixels.

    `length` is the most tokens of text in a sample; the positions of images are not counted.
    `context` is the most positions of both. What is longer is cut, with the images after the cut.
    """

    def __init__(
        self, processor: TokenformerProcessor, length: int, context: int | None = None
    ) -> None:
        self.processor, self.length = processor, length
        self.context = sys.maxsize if context is None else context
        tokenizer = processor.tokenizer
        self.end = tokenizer.eos_token_id
        if self.end is None:
            raise ValueError("the tokenizer has no end-of-text token")
        begin = tokenizer.convert_tokens_to_ids(processor.end_of_image)
        side = processor.image_processor.image_size
        positions = processor.image_positions(side, side)
        self.image_run = [processor.image_token_id] * positions + [begin]

    def encode(self, sample: ImageText) -> EncodedSample:
        ids: list[int] = []
        labels: list[int] = []
        images, target_bytes = 0, 0
        room, left = self.length, self.context  # of text, and of text and images
        for text, is_target in segments(sample.turns):
            for part in split_images(text):
                if part == IMAGE_TOKEN:
                    if not room or left < len(self.image_run):
                        room = 0
                        continue
                    ids += self.image_run
                    labels += [IGNORED] * len(self.image_run)
                    left -= len(self.image_run)
                    images += 1
                    continue
                found = self.tokens(part)[: min(room, left)]
                room, left = room - len(found), left - len(found)
                ids += found
                labels += found if is_target else [IGNORED] * len(found)
                if is_target:
                    target_bytes += len(self.processor.tokenizer.decode(found).encode())
            if is_target and room and left:  # the end of text, which is how the model stops
                ids.append(self.end)
                labels.append(self.end)
                room, left = room - 1, left - 1
        pixels = [self.pixels(image) for image in sample.images[:images]]
        return EncodedSample(ids, labels, pixels, target_bytes)

    def tokens(self, text: str) -> list[int]:
        found: list[int] = self.processor.tokenizer.encode(text, add_special_tokens=False)
        return found

    def pixels(self, image: Any) -> np.ndarray:
        processor = self.processor.image_processor
        fitted = processor.fit(processor.convert_channels(image))
        values: np.ndarray = processor.to_pixel_values(fitted.astype(np.float32))
        return values


def segments(turns: list[Turn]) -> list[tuple[str, bool]]:
    """Return the text of a sample in parts, and whether each has labels, as the chat template of
    `image_text_processing` writes it."""
    found: list[tuple[str, bool]] = []
    for turn in turns:
        if turn.role == CAPTION:
            found.append((turn.text, True))
        elif turn.role == ASSISTANT:
            found += [("assistant: ", False), (turn.text, True)]
        else:
            found.append((f"{turn.role}: {turn.text}\n", False))
    return found


def split_images(text: str) -> list[str]:
    """Split text at `<image>`, which become parts of their own: a<image>b -> a, <image>, b."""
    words = text.split(IMAGE_TOKEN)
    parts = [words[0]]
    for word in words[1:]:
        parts += [IMAGE_TOKEN, word]
    return [part for part in parts if part]


@dataclass(eq=False)
class ImageTextReader:
    """Reads batches; `workers` threads prefetch the next one during training."""

    samples: ImageTextSamples
    encoder: ImageTextEncoder
    workers: int = 0
    prefetched: dict[tuple[int, int], list["Future[EncodedSample]"]] = field(
        init=False, default_factory=dict
    )
    """The samples of the prefetched batch, by (first_sample, count)."""

    def __post_init__(self) -> None:
        self.threads = ThreadPoolExecutor(self.workers) if self.workers else None

    def encoded(self, index: int) -> EncodedSample:
        return self.encoder.encode(self.samples.sample(index))

    def indices(self, first_sample: int, count: int, seed: int) -> list[int]:
        found: list[int] = shuffled_indices(len(self.samples), seed, first_sample, count).tolist()
        return found

    def prefetch(self, first_sample: int, count: int, seed: int) -> None:
        """Start reading the next batch and cancel any batch prefetched before."""
        if self.threads is None:
            return
        for cancelled in self.prefetched.values():
            for future in cancelled:
                future.cancel()
        indices = self.indices(first_sample, count, seed)
        submitted = [self.threads.submit(self.encoded, index) for index in indices]
        self.prefetched = {(first_sample, count): submitted}

    def training_batch(self, first_sample: int, count: int, seed: int) -> ImageTextBatch:
        """Return samples first_sample .. first_sample + count - 1, counted from the first epoch."""
        if futures := self.prefetched.pop((first_sample, count), None):
            return self.batch([future.result() for future in futures])
        return self.plain_batch(self.indices(first_sample, count, seed))

    def plain_batch(self, indices: list[int]) -> ImageTextBatch:
        run = map if self.threads is None else self.threads.map
        return self.batch(list(run(self.encoded, indices)))

    def held_out(self, batch_size: int, count: int) -> list[LazyImageTextBatch]:
        """Return batches of at most `count` samples at even intervals, always the same ones."""
        count = min(count, len(self.samples))
        indices = [i * (len(self.samples) - 1) // max(1, count - 1) for i in range(count)]
        return [
            LazyImageTextBatch(indices[start : start + batch_size], self.plain_batch)
            for start in range(0, count, batch_size)
        ]

    def batch(self, encoded: list[EncodedSample]) -> ImageTextBatch:
        longest = max(len(sample.ids) for sample in encoded)
        ids = torch.full((len(encoded), longest), self.encoder.end)
        labels = torch.full((len(encoded), longest), IGNORED)
        for row, sample in enumerate(encoded):
            ids[row, : len(sample.ids)] = torch.tensor(sample.ids)
            labels[row, : len(sample.ids)] = torch.tensor(sample.labels)
        pixels = [image for sample in encoded for image in sample.pixels]
        return ImageTextBatch(
            ids,
            labels,
            torch.from_numpy(np.stack(pixels)) if pixels else None,
            sum(sample.target_bytes for sample in encoded),
        )
