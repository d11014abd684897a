"""8-bit pixels of an image: to and from Pillow, and between grayscale and RGB."""

from typing import Any

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
"""[H, W, C] of one image, [N, H, W, C] of many; C is 1 or 3."""
MODES_16_BIT = ("I", "I;16", "I;16L", "I;16B", "I;16N")
"""Pillow's modes of 16-bit grayscale images."""


def to_pixels(image: Any) -> Pixels:
    """Return [H, W, 1] for a grayscale Pillow image, [H, W, 3] for any other."""
    if image.mode in MODES_16_BIT:
        # Pillow would clip at 255, which turns almost everything white.
        return (np.clip(np.asarray(image), 0, 65535) // 256).astype(np.uint8)[:, :, None]
    is_gray = image.mode in ("L", "1")
    mode = "L" if is_gray else "RGB"
    pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    return pixels[:, :, None] if is_gray else pixels


def to_pillow(pixels: Pixels) -> Any:
    """Return a Pillow image of mode L or RGB."""
    from PIL import Image

    return Image.fromarray(np.ascontiguousarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels))


def convert_channels(pixels: npt.NDArray[Any], num_channels: int) -> npt.NDArray[Any]:
    """Convert [H, W, C] between grayscale (1 channel) and RGB (3 channels)."""
    if pixels.shape[2] == num_channels:
        return pixels
    if pixels.shape[2] == 1:
        return np.repeat(pixels, num_channels, axis=2)
    return np.asarray(to_pillow(pixels).convert("L"))[:, :, None]
