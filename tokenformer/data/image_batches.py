"""Batches of images with their targets, by the numbers of the samples.

A sample is a pure function of (seed, epoch, image): which image it is, how it is varied, and which
other image it is mixed with. So the same sample comes after a resume, on any rank, in any batch.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True)
class ImageReader:
    """Makes batches of the pictures of a set."""

    pictures: ImageSet
    processor: Any
    """A TokenformerImageProcessor: size, channels and norm."""
    num_classes: int
    workers: int = 0
    """Threads that decode and vary images; Pillow lets them run side by side."""

    def training_batch(
        self, first_sample: int, count: int, seed: int, options: AugmentationOptions
    ) -> ImageBatch:
        """The samples first_sample .. first_sample + count - 1 since the start of training."""
        places = shuffled(len(self.pictures), seed, first_sample, count).tolist()
        epochs = [(first_sample + i) // len(self.pictures) for i in range(count)]

        def make(pair: tuple[int, int]) -> tuple[Values, np.ndarray]:
            return self.sample(pair[1], (seed, pair[0], pair[1]), options)

        return self.batch(self.mapped(make, list(zip(epochs, places, strict=True))))

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

    def plain_sample(self, place: int) -> tuple[Values, np.ndarray]:
        pixels, label = self.pictures.picture(place)
        fitted = self.processor.fit(self.in_channels(pixels))
        return fitted.astype(np.float32), self.target(label, 0.0)

    def sample(
        self, place: int, key: tuple[int, int, int], options: AugmentationOptions
    ) -> tuple[Values, np.ndarray]:
        image, target = self.varied(place, options, generator(*key, VARY))
        if options.mixup or options.cutmix:
            random = generator(*key, MIX)
            partner = int(random.integers(len(self.pictures)))
            other, other_target = self.varied(partner, options, generator(*key, VARY_PARTNER))
            image, share = mixed(image, other, options, random)
            target = share * target + (1 - share) * other_target
        return image, target

    def varied(
        self, place: int, options: AugmentationOptions, random: np.random.Generator
    ) -> tuple[Values, np.ndarray]:
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

    def batch(self, samples: list[tuple[Values, np.ndarray]]) -> ImageBatch:
        pixels = np.stack([image for image, _ in samples])  # [B, H, W, C], from 0 to 255
        mean = np.asarray(self.processor.image_mean, np.float32)
        std = np.asarray(self.processor.image_std, np.float32)
        normed = (pixels / np.float32(255) - mean) / std
        return ImageBatch(
            torch.from_numpy(normed).permute(0, 3, 1, 2).contiguous(),
            torch.from_numpy(np.stack([target for _, target in samples])),
        )

    def mapped(self, make: Callable[[Any], Any], items: list[Any]) -> list[Any]:
        with self.pool() as run:
            return list(run(make, items))

    @contextmanager
    def pool(self) -> Iterator[Callable[..., Any]]:
        if not self.workers:
            yield map
            return
        with ThreadPoolExecutor(self.workers) as threads:
            yield threads.map


def generator(seed: int, epoch: int, place: int, purpose: int) -> np.random.Generator:
    """numpy keeps what PCG64 gives for a seed the same from version to version."""
    return np.random.Generator(np.random.PCG64([seed, epoch, place, purpose]))
