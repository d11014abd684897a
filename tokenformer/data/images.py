"""Image sets: pictures by number, each with a class, whatever they are stored as.

    pictures = ArrayImages(pixels, labels, classes)     # in memory, all of one size
    pictures = FileImages(paths, labels, classes)       # decoded when asked for

A picture that cannot be decoded is refused by name, or with `on_corrupt="skip"` replaced by the
next one that can be, the same on every run; who was skipped is noted in `skipped`.
"""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tokenformer.data.errors import DataError

Pixels = npt.NDArray[np.uint8]
"""[H, W, C] of one picture, [N, H, W, C] of many; C is 1 or 3."""

DEEP = ("I", "I;16", "I;16L", "I;16B", "I;16N")
"""Pillow's modes of grey images with 16 bits a pixel."""
POLICIES = ("refuse", "skip")
MOST_IN_A_ROW = 1000


class ImageSet(Protocol):
    classes: list[str]

    def __len__(self) -> int: ...

    def picture(self, index: int) -> tuple[Pixels, int]:
        """Pixels [H, W, C] and the class."""
        ...


class ArrayImages:
    def __init__(
        self, pixels: Pixels, labels: npt.NDArray[Any], classes: Sequence[str] | None = None
    ) -> None:
        if len(pixels) != len(labels):
            raise DataError(f"{len(pixels)} images have {len(labels)} labels")
        if not len(pixels):
            raise DataError("there are no images")
        self.pixels, self.labels = pixels, np.asarray(labels, dtype=np.int64)
        count = int(self.labels.max()) + 1
        self.classes = list(classes) if classes else [str(label) for label in range(count)]
        if count > len(self.classes):
            raise DataError(f"a label is {count - 1}, but there are {len(self.classes)} classes")

    def __len__(self) -> int:
        return len(self.pixels)

    def picture(self, index: int) -> tuple[Pixels, int]:
        return self.pixels[index], int(self.labels[index])


class FileImages:
    """Image files of any kind that Pillow reads, as colour."""

    def __init__(
        self,
        paths: Sequence[Path],
        labels: Sequence[int],
        classes: Sequence[str],
        on_corrupt: str = "refuse",
    ) -> None:
        check_policy(on_corrupt)
        self.paths, self.labels, self.classes = list(paths), list(labels), list(classes)
        self.on_corrupt = on_corrupt
        self.skipped: set[Path] = set()
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.paths)

    def picture(self, index: int) -> tuple[Pixels, int]:
        for step in range(min(len(self), MOST_IN_A_ROW)):
            place = (index + step) % len(self)
            try:
                return decoded(self.paths[place]), self.labels[place]
            except DataError:
                if self.on_corrupt == "refuse":
                    raise
                with self.lock:
                    self.skipped.add(self.paths[place])
        raise DataError(f"{self.paths[index]} and all after it cannot be read as images")


class DatasetImages:
    """A split of a Hugging Face dataset with a column of images and one of classes."""

    def __init__(self, rows: Any, image: str, label: str, on_corrupt: str = "refuse") -> None:
        check_policy(on_corrupt)
        self.rows, self.image, self.label, self.on_corrupt = rows, image, label, on_corrupt
        names = getattr(rows.features[label], "names", None)
        self.classes = list(names or map(str, range(max(rows[label]) + 1)))
        self.skipped: set[int] = set()

    def __len__(self) -> int:
        return len(self.rows)

    def picture(self, index: int) -> tuple[Pixels, int]:
        for step in range(min(len(self), MOST_IN_A_ROW)):
            place = (index + step) % len(self)
            try:
                row = self.rows[place]
                return in_channels(row[self.image]), int(row[self.label])
            except (OSError, SyntaxError, ValueError) as error:
                if self.on_corrupt == "refuse":
                    raise DataError(f"row {place} cannot be read as an image: {error}") from None
                self.skipped.add(place)
        raise DataError(f"row {index} and all after it cannot be read as images")


class SubsetImages:
    """Some pictures of another set, in the order of `places`."""

    def __init__(self, whole: ImageSet, places: Sequence[int]) -> None:
        self.whole, self.places, self.classes = whole, list(places), whole.classes

    def __len__(self) -> int:
        return len(self.places)

    def picture(self, index: int) -> tuple[Pixels, int]:
        return self.whole.picture(self.places[index])


def decoded(path: Path) -> Pixels:
    """The pixels of an image file; a file that holds none is refused by name."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return in_channels(image)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path} cannot be read as an image: {reason}") from None


def in_channels(image: Any) -> Pixels:
    """[H, W, 1] of a grey Pillow image, [H, W, 3] of any other, upright as its camera noted."""
    from PIL import ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode in DEEP:
        # Pillow would cut off what is above 255, and leave nearly all white.
        return (np.clip(np.asarray(image), 0, 65535) // 256).astype(np.uint8)[:, :, None]
    grey = image.mode in ("L", "1")
    pixels = np.asarray(image.convert("L" if grey else "RGB"))
    return pixels[:, :, None] if grey else pixels


def check_policy(on_corrupt: str) -> None:
    if on_corrupt not in POLICIES:
        raise DataError(f"on_corrupt={on_corrupt!r} is unknown; choose {' or '.join(POLICIES)}")
