"""RandAugment: a few random operations per image, at one magnitude.

Cubuk et al., 2019, https://arxiv.org/abs/1909.13719. As in MAE's recipe the magnitude of each
operation is sampled around the given one, and a larger magnitude always changes the image more.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

MAX_SHEAR, MAX_TRANSLATION, MAX_DEGREES = 0.3, 0.45, 30.0
FILL = 128
MAX_MAGNITUDE = 10.0

Operation = Callable[[Any, float], Any]
"""(a Pillow image, a level in [-1, 1] or [0, 1]) -> an image."""


def transform(image: Any, matrix: tuple[float, ...]) -> Any:
    from PIL import Image

    fill = FILL if image.mode == "L" else (FILL,) * 3
    return image.transform(
        image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC, fillcolor=fill
    )


def rotate(image: Any, level: float) -> Any:
    from PIL import Image

    fill = FILL if image.mode == "L" else (FILL,) * 3
    return image.rotate(MAX_DEGREES * level, Image.Resampling.BICUBIC, fillcolor=fill)


def enhancement(kind: str) -> Operation:
    """More or less color, contrast, brightness or sharpness."""

    def enhance(image: Any, level: float) -> Any:
        from PIL import ImageEnhance

        return getattr(ImageEnhance, kind)(image).enhance(max(0.1, 1 + 0.9 * level))

    return enhance


def image_op(kind: str, *arguments: Callable[[float], int]) -> Operation:
    """An operation of ImageOps with integer arguments computed from the level, or none."""

    def apply(image: Any, level: float) -> Any:
        from PIL import ImageOps

        return getattr(ImageOps, kind)(image, *(make(abs(level)) for make in arguments))

    return apply


def solarize_add(image: Any, level: float) -> Any:
    """Brighten the pixels below 128."""
    added = int(110 * abs(level))
    table = [min(255, value + added) if value < 128 else value for value in range(256)]
    return image.point(table * len(image.getbands()))


OPERATIONS: dict[str, Operation] = {
    "shear_x": lambda image, level: transform(image, (1, MAX_SHEAR * level, 0, 0, 1, 0)),
    "shear_y": lambda image, level: transform(image, (1, 0, 0, MAX_SHEAR * level, 1, 0)),
    "translate_x": lambda image, level: transform(
        image, (1, 0, MAX_TRANSLATION * level * image.size[0], 0, 1, 0)
    ),
    "translate_y": lambda image, level: transform(
        image, (1, 0, 0, 0, 1, MAX_TRANSLATION * level * image.size[1])
    ),
    "rotate": rotate,
    "color": enhancement("Color"),
    "contrast": enhancement("Contrast"),
    "brightness": enhancement("Brightness"),
    "sharpness": enhancement("Sharpness"),
    "auto_contrast": image_op("autocontrast"),
    "equalize": image_op("equalize"),
    "invert": image_op("invert"),
    "posterize": image_op("posterize", lambda level: max(1, 4 - int(4 * level))),
    "solarize": image_op("solarize", lambda level: 256 - int(256 * level)),
    "solarize_add": solarize_add,
}


def randaugment(
    image: Any, random: np.random.Generator, *, count: int, magnitude: float, deviation: float
) -> Any:
    """Apply `count` operations to a Pillow image of mode L or RGB, each with probability 0.5."""
    names = list(OPERATIONS)
    for _ in range(count):
        name = names[random.integers(len(names))]
        sampled = random.normal(magnitude, deviation) if deviation else magnitude
        level = float(np.clip(sampled, 0, MAX_MAGNITUDE)) / MAX_MAGNITUDE
        sign = 1 if random.random() < 0.5 else -1
        if random.random() < 0.5:
            image = OPERATIONS[name](image, sign * level)
    return image
