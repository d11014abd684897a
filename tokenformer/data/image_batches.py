"""Batches of images and targets for training and validation.

A sample is a pure function of (seed, epoch, image): its augmentation and the image it is mixed
with. So it is the same after a resume, on any rank and in any batch.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenformer.data.augmentation import Values, augment, mix
from tokenformer.data.augmentation_options import AugmentationOptions
from tokenformer.data.images import ImageSet
from tokenformer.data.order import shuffled_indices
from tokenformer.models.image_processing import TokenformerImageProcessor

AUGMENT, MIX, AUGMENT_PARTNER = range(3)
"""Purposes of random generators; each has its own stream."""


@dataclass(frozen=True)
class ImageBatch:
    pixels: Tensor  # [B, C, H, W], normalized
    targets: Tensor  # [B, classes], probabilities

    def __len__(self) -> int:
        return len(self.pixels)

    def to(self, device: torch.device | str) -> "ImageBatch":
        return ImageBatch(self.pixels.to(device), self.targets.to(device))


@dataclass(frozen=True)
class LazyBatch:
    """A batch that is read when it is moved to a device, so that a large set need not fit in
    memory."""

    indices: list[int]
    read: Callable[[list[int]], ImageBatch]

    def __len__(self) -> int:
        return len(self.indices)

    def to(self, device: torch.device | str) -> ImageBatch:
        return self.read(self.indices).to(device)


Sample = tuple[Values, np.ndarray]
"""Pixels [H, W, C], 0 to 255, and the target [classes]."""


@dataclass(eq=False)
class ImageReader:
    """Reads batches from an image set; `workers` threads prefetch the next one during training."""

    pictures: ImageSet
    processor: TokenformerImageProcessor
    num_classes: int
    workers: int = 0
    """Threads that decode and augment images; Pillow releases the GIL."""
    prefetched: dict[tuple[int, int], list["Future[Sample]"]] = field(
        init=False, default_factory=dict
    )
    """The samples of the prefetched batch, by (first_sample, count)."""

    def __post_init__(self) -> None:
        self.threads = ThreadPoolExecutor(self.workers) if self.workers else None

    def prefetch(
        self, first_sample: int, count: int, seed: int, options: AugmentationOptions
    ) -> None:
        """Start reading the next batch and cancel any batch prefetched before."""
        if self.threads is None:
            return
        for cancelled in self.prefetched.values():
            for future in cancelled:
                future.cancel()
        keys = self.keys(first_sample, count, seed)
        samples = [self.threads.submit(self.sample, key, options) for key in keys]
        self.prefetched = {(first_sample, count): samples}

    def training_batch(
        self, first_sample: int, count: int, seed: int, options: AugmentationOptions
    ) -> ImageBatch:
        """Return samples first_sample .. first_sample + count - 1, counted from the first epoch."""
        if futures := self.prefetched.pop((first_sample, count), None):
            return self.batch([future.result() for future in futures])
        keys = self.keys(first_sample, count, seed)
        return self.batch(self.map(lambda key: self.sample(key, options), keys))

    def keys(self, first_sample: int, count: int, seed: int) -> list[tuple[int, int, int]]:
        """Return (seed, epoch, image) of these samples, which determine them."""
        indices = shuffled_indices(len(self.pictures), seed, first_sample, count).tolist()
        samples = range(first_sample, first_sample + count)
        return [
            (seed, sample // len(self.pictures), index)
            for sample, index in zip(samples, indices, strict=True)
        ]

    def plain_batch(self, indices: list[int]) -> ImageBatch:
        """Return these images without augmentation, for validation."""
        return self.batch(self.map(self.plain_sample, indices))

    def held_out(self, batch_size: int, count: int) -> list[LazyBatch]:
        """Return batches of at most `count` images at even intervals, always the same ones."""
        count = min(count, len(self.pictures))
        indices = [i * (len(self.pictures) - 1) // max(1, count - 1) for i in range(count)]
        return [
            LazyBatch(indices[start : start + batch_size], self.plain_batch)
            for start in range(0, count, batch_size)
        ]

    def plain_sample(self, index: int) -> Sample:
        pixels, label = self.pictures.picture(index)
        fitted = self.processor.fit(self.processor.convert_channels(pixels))
        return fitted.astype(np.float32), self.target(label, 0.0)

    def sample(self, key: tuple[int, int, int], options: AugmentationOptions) -> Sample:
        image, target = self.augmented(key[-1], options, generator(*key, AUGMENT))
        if options.mixup or options.cutmix:
            random = generator(*key, MIX)
            partner = int(random.integers(len(self.pictures)))
            other, other_target = self.augmented(partner, options, generator(*key, AUGMENT_PARTNER))
            image, share = mix(image, other, options, random)
            target = share * target + (1 - share) * other_target
        return image, target

    def augmented(
        self, index: int, options: AugmentationOptions, random: np.random.Generator
    ) -> Sample:
        pixels, label = self.pictures.picture(index)
        pixels = augment(self.processor.convert_channels(pixels), options, random, self.processor)
        return pixels.astype(np.float32), self.target(label, options.label_smoothing)

    def target(self, label: int, smoothing: float) -> np.ndarray:
        target = np.full(self.num_classes, smoothing / self.num_classes, dtype=np.float32)
        target[label] += 1 - smoothing
        return target

    def batch(self, samples: list[Sample]) -> ImageBatch:
        values = np.stack([self.processor.to_pixel_values(image) for image, _ in samples])
        return ImageBatch(
            torch.from_numpy(values).contiguous(),  # [B, C, H, W]
            torch.from_numpy(np.stack([target for _, target in samples])),
        )

    def map(self, make: Callable[[Any], Sample], items: list[Any]) -> list[Sample]:
        return list(map(make, items) if self.threads is None else self.threads.map(make, items))


def generator(seed: int, epoch: int, index: int, purpose: int) -> np.random.Generator:
    """PCG64, whose stream for a seed is the same in every version of numpy."""
    return np.random.Generator(np.random.PCG64([seed, epoch, index, purpose]))
