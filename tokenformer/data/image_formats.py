"""Readers of binary image sets: IDX (MNIST, Fashion-MNIST) and CIFAR.

Files may be gzipped. They are read into memory and checked against their headers or record size.
"""

import gzip
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenformer.data.images import ArrayImages
from tokenformer.errors import DataError

IDX_BYTES, IDX_IMAGES, IDX_LABELS = 8, 3, 1
"""The type code of uint8, and the dimensions of images [N, H, W] and of labels [N]."""
CIFAR_SIDE, CIFAR_CHANNELS = 32, 3
CIFAR_PIXELS = CIFAR_CHANNELS * CIFAR_SIDE**2


def read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Return the array of an IDX file: two zero bytes, a type, the shape, then the values."""
    data = read_bytes(path)
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] != IDX_BYTES or not 1 <= data[3] <= 4:
        raise DataError(f"{path} is not an IDX file of bytes: it begins with {data[:4].hex()}")
    dimensions, start = data[3], 4 + 4 * data[3]
    shape = struct.unpack(f">{dimensions}I", data[4:start]) if len(data) >= start else ()
    if not shape or len(data) - start != int(np.prod(shape, dtype=object)):
        raise DataError(f"{path} is truncated: {len(data)} bytes, for an array of {shape}")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def idx_images(images: Path, labels: Path, classes: list[str] | None = None) -> ArrayImages:
    pixels, targets = read_idx(images), read_idx(labels)
    for path, array, wanted in ((images, pixels, IDX_IMAGES), (labels, targets, IDX_LABELS)):
        if array.ndim != wanted:
            raise DataError(f"{path} has {array.ndim} dimensions; expected {wanted}")
    if len(pixels) != len(targets):
        raise DataError(f"{images} has {len(pixels)} images, {labels} has {len(targets)} labels")
    return ArrayImages(pixels[..., None], targets, classes)


def cifar_images(paths: list[Path], classes: list[str]) -> ArrayImages:
    """Read CIFAR-10 (a label and 3072 pixels per record) or, with 100 classes, CIFAR-100 (a coarse
    and a fine label)."""
    labels = 2 if len(classes) == 100 else 1
    size = labels + CIFAR_PIXELS
    parts: list[npt.NDArray[Any]] = []
    for path in paths:
        data = read_bytes(path)
        if not data or len(data) % size:
            raise DataError(f"{path} is truncated: {len(data)} bytes are not a multiple of {size}")
        parts.append(np.frombuffer(data, np.uint8).reshape(-1, size))
    records = np.concatenate(parts)
    planes = records[:, labels:].reshape(-1, CIFAR_CHANNELS, CIFAR_SIDE, CIFAR_SIDE)
    return ArrayImages(planes.transpose(0, 2, 3, 1).copy(), records[:, labels - 1], classes)
