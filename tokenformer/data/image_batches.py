"""Batches of images with their targets, by the numbers of the samples.

A sample is a pure function of (seed, epoch, image): which image it is, how it is varied, and which
other image it is mixed with. So the same sample comes after a resume, on any rank, in any batch.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenformer.data.augmentation import Values, as_image, augmented, mixed
from tokenformer.data.augmentation_options import AugmentationOptions
from tokenformer.data.images import ImageSet, Pixels
from tokenformer.data.order import shuffled

VARY, MIX, VARY_PARTNER = range(3)
"""What a generator is for; each draws on its own."""


@dataclass(frozen=True)
class ImageBatch:
    pixels: Tensor  # [B, C, H, W], normalised
    targets: Tensor  # [B, classes], distributions

    def __len__(self) -> int:
        return len(self.pixels)

    def to(self, device: torch.device | str) -> "ImageBatch":
        return ImageBatch(self.pixels.to(device), self.targets.to(device))


@dataclass(frozen=True)
class AwaitedBatch:
    """A batch that is read when it is to go somewhere, so that a large set need not fit."""

    places: list[int]
    read: Callable[[list[int]], ImageBatch]

    def __len__(self) -> int:
        return len(self.places)

    def to(self, device: torch.device | str) -> ImageBatch:
        return self.read(self.places).to(device)


Sample = tuple[Values, np.ndarray]
"""Pixels [H, W, C] from 0 to 255, and the target [classes]."""


@dataclass(eq=False)
class ImageReader:
    """Makes batches of the pictures of a set, with `workers` while others are trained on."""

    pictures: ImageSet
    processor: Any
    """A TokenformerImageProcessor: size, channels and norm."""
    num_classes: int
    workers: int = 0
    """Threads that decode and vary images; Pillow lets them run side by side."""
    coming: dict[tuple[int, int], list["Future[Sample]"]] = field(init=False, default_factory=dict)
    """What was told to be asked for next: the samples of (first sample, count)."""

    def __post_init__(self) -> None:
        self.threads = ThreadPoolExecutor(self.workers) if self.workers else None

    def expect(
        self, first_sample: int, count: int, seed: int, options: AugmentationOptions
    ) -> None:
        """Begin with a batch that is asked for soon; one that was expected before is given up."""
        if self.threads is None:
            return
        for given_up in self.coming.values():
            for future in given_up:
                future.cancel()
        keys = self.keys(first_sample, count, seed)
        samples = [self.threads.submit(self.sample, key, options) for key in keys]
        self.coming = {(first_sample, count): samples}

    def training_batch(
        self, first_sample: int, count: int, seed: int, options: AugmentationOptions
    ) -> ImageBatch:
        """The samples first_sample .. first_sample + count - 1 since the start of training."""
        if coming := self.coming.pop((first_sample, count), None):
            return self.batch([future.result() for future in coming])
        keys = self.keys(first_sample, count, seed)
        return self.batch(self.mapped(lambda key: self.sample(key, options), keys))

    def keys(self, first_sample: int, count: int, seed: int) -> list[tuple[int, int, int]]:
        """(seed, epoch, image) of these samples: all that they depend on."""
        places = shuffled(len(self.pictures), seed, first_sample, count).tolist()
        samples = range(first_sample, first_sample + count)
        return [
            (seed, sample // len(self.pictures), place)
            for sample, place in zip(samples, places, strict=True)
        ]

    def plain_batch(self, places: list[int]) -> ImageBatch:
        """These pictures as they are, for validation."""
        return self.batch(self.mapped(self.plain_sample, places))

    def held_out(self, batch_size: int, count: int) -> list[AwaitedBatch]:
        """At most `count` pictures spread evenly over the set, always the same."""
        count = min(count, len(self.pictures))
        places = [i * (len(self.pictures) - 1) // max(1, count - 1) for i in range(count)]
        return [
            AwaitedBatch(places[start : start + batch_size], self.plain_batch)
            for start in range(0, count, batch_size)
        ]

    def plain_sample(self, place: int) -> Sample:
        pixels, label = self.pictures.picture(place)
        fitted = self.processor.fit(self.in_channels(pixels))
        return fitted.astype(np.float32), self.target(label, 0.0)

    def sample(self, key: tuple[int, int, int], options: AugmentationOptions) -> Sample:
        image, target = self.varied(key[-1], options, generator(*key, VARY))
        if options.mixup or options.cutmix:
            random = generator(*key, MIX)
            partner = int(random.integers(len(self.pictures)))
            other, other_target = self.varied(partner, options, generator(*key, VARY_PARTNER))
            image, share = mixed(image, other, options, random)
            target = share * target + (1 - share) * other_target
        return image, target

    def varied(
        self, place: int, options: AugmentationOptions, random: np.random.Generator
    ) -> Sample:
        pixels, label = self.pictures.picture(place)
        made = augmented(self.in_channels(pixels), options, random, self.processor)
        return made.astype(np.float32), self.target(label, options.label_smoothing)

    def in_channels(self, pixels: Pixels) -> Pixels:
        if pixels.shape[2] == self.processor.num_channels:
            return pixels
        if pixels.shape[2] == 1:
            return np.repeat(pixels, 3, axis=2)
        return np.asarray(as_image(pixels).convert("L"))[:, :, None]

    def target(self, label: int, smoothing: float) -> np.ndarray:
        target = np.full(self.num_classes, smoothing / self.num_classes, dtype=np.float32)
        target[label] += 1 - smoothing
        return target

    def batch(self, samples: list[Sample]) -> ImageBatch:
        pixels = np.stack([image for image, _ in samples])  # [B, H, W, C], from 0 to 255
        mean = np.asarray(self.processor.image_mean, np.float32)
        std = np.asarray(self.processor.image_std, np.float32)
        normed = (pixels / np.float32(255) - mean) / std
        return ImageBatch(
            torch.from_numpy(normed).permute(0, 3, 1, 2).contiguous(),
            torch.from_numpy(np.stack([target for _, target in samples])),
        )

    def mapped(self, make: Callable[[Any], Sample], items: list[Any]) -> list[Sample]:
        return list(map(make, items) if self.threads is None else self.threads.map(make, items))


def generator(seed: int, epoch: int, place: int, purpose: int) -> np.random.Generator:
    """numpy keeps what PCG64 gives for a seed the same from version to version."""
    return np.random.Generator(np.random.PCG64([seed, epoch, place, purpose]))
