"""Training images, varied: crops, mirroring, RandAugment; blends and patchworks of two images.

Whatever is drawn comes from a generator that the caller seeds by (seed, epoch, image), so an image
varies from epoch to epoch and is the same after a resume, on any rank and in any batch.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from tokenformer.data.augmentation_options import AugmentationOptions
from tokenformer.data.images import Pixels
from tokenformer.data.randaugment import randaugment

Values = npt.NDArray[np.float32]

ATTEMPTS = 10
MOST_STRETCHED = 4 / 3


def augmented(
    pixels: Pixels, options: AugmentationOptions, random: np.random.Generator, processor: Any
) -> Pixels:
    """Pixels [H, W, C] of any size to the square of the model, [S, S, C]."""
    size = processor.image_size
    if options.crop == "resized":
        pixels = resized_crop(pixels, size, options.smallest_crop, random)
    else:
        pixels = processor.fit(pixels)
    if options.crop == "padded":
        pixels = padded_crop(pixels, random)
    if options.flip and random.random() < 0.5:
        pixels = pixels[:, ::-1]
    if options.randaugment:
        image = randaugment(
            as_image(pixels),
            random,
            count=options.randaugment,
            magnitude=options.magnitude,
            deviation=options.magnitude_std,
        )
        pixels = np.asarray(image).reshape(pixels.shape)
    return pixels


def padded_crop(pixels: Pixels, random: np.random.Generator) -> Pixels:
    height, width = pixels.shape[:2]
    pad = max(1, height // 8)
    top, left = random.integers(2 * pad + 1, size=2)
    padded = np.pad(pixels, ((pad, pad), (pad, pad), (0, 0)))
    return padded[top : top + height, left : left + width]


def resized_crop(pixels: Pixels, size: int, smallest: float, random: np.random.Generator) -> Pixels:
    """A part of a random area and shape, resized to a square: Inception's crop."""
    from PIL import Image

    height, width = pixels.shape[:2]
    box = (0, 0, width, height)
    for _ in range(ATTEMPTS):
        area = random.uniform(smallest, 1) * height * width
        shape = np.exp(random.uniform(-1, 1) * np.log(MOST_STRETCHED))
        wide, high = round((area * shape) ** 0.5), round((area / shape) ** 0.5)
        if 0 < wide <= width and 0 < high <= height:
            left, top = random.integers(width - wide + 1), random.integers(height - high + 1)
            box = (int(left), int(top), int(left) + wide, int(top) + high)
            break
    cropped = as_image(pixels).resize((size, size), Image.Resampling.BICUBIC, box=box)
    return np.asarray(cropped).reshape(size, size, pixels.shape[2])


def as_image(pixels: Pixels) -> Any:
    from PIL import Image

    return Image.fromarray(np.ascontiguousarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels))


def mixed(
    first: Values, second: Values, options: AugmentationOptions, random: np.random.Generator
) -> tuple[Values, float]:
    """A blend (mixup, arXiv 1710.09412) or a patchwork (cutmix, arXiv 1905.04899) of two images,
    and what is left of the first."""
    cut = options.cutmix > 0 and (options.mixup == 0 or random.random() < 0.5)
    share = float(random.beta(*[options.cutmix if cut else options.mixup] * 2))
    if not cut:
        return np.float32(share) * first + np.float32(1 - share) * second, share
    height, width = first.shape[:2]
    side = (1 - share) ** 0.5
    high, wide = int(height * side), int(width * side)
    middle, centre = random.integers(height), random.integers(width)
    top, bottom = max(0, middle - high // 2), min(height, middle - high // 2 + high)
    left, right = max(0, centre - wide // 2), min(width, centre - wide // 2 + wide)
    patchwork = first.copy()
    patchwork[top:bottom, left:right] = second[top:bottom, left:right]
    return patchwork, float(1 - (bottom - top) * (right - left) / (height * width))
