"""Augmentation of training images: crops, flips, RandAugment, mixup and CutMix.

The caller seeds the random generator by (seed, epoch, image), so the augmentation of an image
changes every epoch and is the same after a resume, on any rank and in any batch.
"""

import numpy as np
import numpy.typing as npt

from tokenformer.data.augmentation_options import AugmentationOptions
from tokenformer.data.randaugment import randaugment
from tokenformer.models.image_processing import TokenformerImageProcessor
from tokenformer.models.pixels import Pixels, to_pillow

Values = npt.NDArray[np.float32]

ATTEMPTS = 10
MAX_ASPECT_RATIO = 4 / 3


def augment(
    pixels: Pixels,
    options: AugmentationOptions,
    random: np.random.Generator,
    processor: TokenformerImageProcessor,
) -> Pixels:
    """Augment pixels [H, W, C] of any size and fit them to the model, [S, S, C]."""
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
            to_pillow(pixels),
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
    """Crop a random area and aspect ratio and resize it to a square, as Inception does."""
    from PIL import Image

    height, width = pixels.shape[:2]
    box = (0, 0, width, height)
    for _ in range(ATTEMPTS):
        area = random.uniform(smallest, 1) * height * width
        ratio = np.exp(random.uniform(-1, 1) * np.log(MAX_ASPECT_RATIO))
        wide, high = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < wide <= width and 0 < high <= height:
            left, top = random.integers(width - wide + 1), random.integers(height - high + 1)
            box = (int(left), int(top), int(left) + wide, int(top) + high)
            break
    cropped = to_pillow(pixels).resize((size, size), Image.Resampling.BICUBIC, box=box)
    return np.asarray(cropped).reshape(size, size, pixels.shape[2])


def mix(
    first: Values, second: Values, options: AugmentationOptions, random: np.random.Generator
) -> tuple[Values, float]:
    """Return a blend (mixup, arXiv 1710.09412) or a cut-and-paste (CutMix, arXiv 1905.04899) of two
    images, and the share of the first."""
    cut = options.cutmix > 0 and (options.mixup == 0 or random.random() < 0.5)
    alpha = options.cutmix if cut else options.mixup
    share = float(random.beta(alpha, alpha))
    if not cut:
        return np.float32(share) * first + np.float32(1 - share) * second, share
    height, width = first.shape[:2]
    side = (1 - share) ** 0.5
    high, wide = int(height * side), int(width * side)
    center_y, center_x = random.integers(height), random.integers(width)
    top, bottom = max(0, center_y - high // 2), min(height, center_y - high // 2 + high)
    left, right = max(0, center_x - wide // 2), min(width, center_x - wide // 2 + wide)
    pasted = first.copy()
    pasted[top:bottom, left:right] = second[top:bottom, left:right]
    return pasted, float(1 - (bottom - top) * (right - left) / (height * width))
