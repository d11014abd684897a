"""RandAugment: a few operations, drawn anew for every image, at one magnitude.

Cubuk et al., 2019, https://arxiv.org/abs/1909.13719; as in MAE's recipe the magnitude of each
operation is drawn around the given one, and a larger one always changes the image more.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

MOST_SHEAR, MOST_SHIFT, MOST_TURN = 0.3, 0.45, 30.0
FILL = 128
LARGEST = 10.0

Operation = Callable[[Any, float], Any]
"""(a Pillow image, a level in [-1, 1] or [0, 1]) -> an image."""


def warped(image: Any, matrix: tuple[float, ...]) -> Any:
    from PIL import Image

    fill = FILL if image.mode == "L" else (FILL,) * 3
    return image.transform(
        image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC, fillcolor=fill
    )


def turned(image: Any, level: float) -> Any:
    from PIL import Image

    fill = FILL if image.mode == "L" else (FILL,) * 3
    return image.rotate(MOST_TURN * level, Image.Resampling.BICUBIC, fillcolor=fill)


def enhanced(kind: str) -> Operation:
    """Colour, contrast, brightness or sharpness, more or less of it."""

    def enhance(image: Any, level: float) -> Any:
        from PIL import ImageEnhance

        return getattr(ImageEnhance, kind)(image).enhance(max(0.1, 1 + 0.9 * level))

    return enhance


def toned(kind: str, *arguments: Callable[[float], int]) -> Operation:
    """An operation of ImageOps that takes whole numbers, made of the level, or none."""

    def tone(image: Any, level: float) -> Any:
        from PIL import ImageOps

        return getattr(ImageOps, kind)(image, *(make(abs(level)) for make in arguments))

    return tone


def brightened_shadows(image: Any, level: float) -> Any:
    """Add to what is darker than the middle: solarize-add."""
    added = int(110 * abs(level))
    table = [min(255, value + added) if value < 128 else value for value in range(256)]
    return image.point(table * len(image.getbands()))


OPERATIONS: dict[str, Operation] = {
    "shear_x": lambda image, level: warped(image, (1, MOST_SHEAR * level, 0, 0, 1, 0)),
    "shear_y": lambda image, level: warped(image, (1, 0, 0, MOST_SHEAR * level, 1, 0)),
    "shift_x": lambda image, level: warped(
        image, (1, 0, MOST_SHIFT * level * image.size[0], 0, 1, 0)
    ),
    "shift_y": lambda image, level: warped(
        image, (1, 0, 0, 0, 1, MOST_SHIFT * level * image.size[1])
    ),
    "turn": turned,
    "colour": enhanced("Color"),
    "contrast": enhanced("Contrast"),
    "brightness": enhanced("Brightness"),
    "sharpness": enhanced("Sharpness"),
    "auto_contrast": toned("autocontrast"),
    "equalize": toned("equalize"),
    "invert": toned("invert"),
    "posterize": toned("posterize", lambda level: max(1, 4 - int(4 * level))),
    "solarize": toned("solarize", lambda level: 256 - int(256 * level)),
    "brighten_shadows": brightened_shadows,
}


def randaugment(
    image: Any, random: np.random.Generator, *, count: int, magnitude: float, deviation: float
) -> Any:
    """`count` operations on a Pillow image of mode L or RGB, each with chance one half."""
    names = list(OPERATIONS)
    for _ in range(count):
        name = names[random.integers(len(names))]
        drawn = random.normal(magnitude, deviation) if deviation else magnitude
        level = float(np.clip(drawn, 0, LARGEST)) / LARGEST
        sign = 1 if random.random() < 0.5 else -1
        if random.random() < 0.5:
            image = OPERATIONS[name](image, sign * level)
    return image
