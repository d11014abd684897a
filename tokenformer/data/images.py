"""Labeled image sets, in memory or decoded on access.

    images = ArrayImages(pixels, labels, classes)     # in memory, all of one size
    images = FileImages(paths, labels, classes)       # decoded on access

An image that cannot be decoded raises an error that names it. With `on_corrupt="skip"` the next
readable image takes its index, the same one on every run; skipped images are logged and listed in
`skipped`. An image with more pixels than Pillow's MAX_IMAGE_PIXELS is refused before decoding.
"""

import logging
import math
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tokenformer.errors import DataError, one_line
from tokenformer.models.pixels import Pixels, to_pillow, to_pixels

logger = logging.getLogger(__name__)

MAX_PIXELS = 1 << 24
"""Images with more pixels are downscaled while they are decoded. Models take far fewer."""
STRIP_ROWS = 64
"""Output rows that are downscaled at a time, so that a large image is not in memory twice."""
POLICIES = ("refuse", "skip")
MAX_SKIPPED_IN_A_ROW = 1000


class CorruptImageError(DataError):
    """An image cannot be decoded."""


class ImageSet(Protocol):
    classes: list[str]

    def __len__(self) -> int: ...

    def picture(self, index: int) -> tuple[Pixels, int]:
        """Return the pixels [H, W, C] and the class of an image."""
        ...


class ArrayImages:
    def __init__(
        self, pixels: Pixels, labels: npt.NDArray[Any], classes: Sequence[str] | None = None
    ) -> None:
        if len(pixels) != len(labels):
            raise DataError(f"{len(pixels)} images have {len(labels)} labels")
        if not len(pixels):
            raise DataError("the image set is empty")
        self.pixels, self.labels = pixels, np.asarray(labels, dtype=np.int64)
        count = int(self.labels.max()) + 1
        self.classes = list(classes) if classes else [str(label) for label in range(count)]
        if count > len(self.classes):
            raise DataError(f"a label is {count - 1}, but there are {len(self.classes)} classes")

    def __len__(self) -> int:
        return len(self.pixels)

    def picture(self, index: int) -> tuple[Pixels, int]:
        return self.pixels[index], int(self.labels[index])


class CorruptPolicy:
    """What to do at an image that cannot be decoded: `refuse` it, or `skip` it and list it."""

    def __init__(self, on_corrupt: str) -> None:
        check_policy(on_corrupt)
        self.on_corrupt = on_corrupt
        self.skipped: set[Any] = set()
        self.lock = threading.Lock()

    def handle(self, name: Any, error: DataError) -> None:
        """Raise the error, or log it once, from whichever thread comes first."""
        if self.on_corrupt == "refuse":
            raise error
        with self.lock:
            known = name in self.skipped
            self.skipped.add(name)
        if not known:
            logger.warning("%s; skipped", error)


class DecodedImages(CorruptPolicy):
    """Images that are decoded on access."""

    def __init__(self, labels: Sequence[Any], classes: Sequence[str], on_corrupt: str) -> None:
        super().__init__(on_corrupt)
        self.labels, self.classes = labels, list(classes)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> Any:
        """The name of an image in messages."""
        raise NotImplementedError

    def decode(self, index: int) -> Pixels:
        raise NotImplementedError

    def picture(self, index: int) -> tuple[Pixels, int]:
        for offset in range(min(len(self), MAX_SKIPPED_IN_A_ROW)):
            candidate = (index + offset) % len(self)
            try:
                return self.decode(candidate), self.label(candidate)
            except CorruptImageError as error:
                self.handle(self.name(candidate), error)
        raise DataError(f"{self.name(index)} and all images after it cannot be read")

    def label(self, index: int) -> int:
        label = self.labels[index]
        if label is None or not 0 <= label < len(self.classes):  # -1 in hidden test sets
            raise DataError(f"{self.name(index)} has the label {label}, which is not a class")
        return int(label)


class FileImages(DecodedImages):
    """Image files in any format that Pillow reads, as grayscale or RGB."""

    def __init__(
        self,
        paths: Sequence[Path],
        labels: Sequence[int],
        classes: Sequence[str],
        on_corrupt: str = "refuse",
    ) -> None:
        super().__init__(list(labels), classes, on_corrupt)
        self.paths = list(paths)

    def name(self, index: int) -> Path:
        return self.paths[index]

    def decode(self, index: int) -> Pixels:
        return decode_file(self.paths[index])


class DatasetImages(DecodedImages):
    """A split of a Hugging Face dataset with a column of images and one of classes."""

    def __init__(self, rows: Any, image: str, label: str, on_corrupt: str = "refuse") -> None:
        labels = list(rows[label])
        names = getattr(rows.features[label], "names", None)
        if names is None and not all(isinstance(each, int) for each in labels):
            raise DataError(
                f"column {label} has dtype {rows.features[label].dtype}, not class numbers; "
                "convert it with the dataset's `class_encode_column`"
            )
        super().__init__(labels, names or [str(n) for n in range(max(labels) + 1)], on_corrupt)
        self.feature = replace(rows.features[image], decode=True)
        self.rows, self.image = rows.cast_column(image, replace(self.feature, decode=False)), image

    def name(self, index: int) -> str:
        return f"row {index}"

    def decode(self, index: int) -> Pixels:
        return decode(self.name(index), lambda: self.open(index))

    def open(self, index: int) -> Any:
        """Open the image without decoding it, as `datasets` would, to check its size first."""
        from PIL import Image

        stored = self.rows[index][self.image]
        if stored is None:
            return None
        if stored["bytes"] is not None:
            image: Any = Image.open(BytesIO(stored["bytes"]))
        elif Path(stored["path"]).is_file():
            image = Image.open(stored["path"])
        else:
            return self.feature.decode_example(stored)  # inside an archive, or on the hub
        if self.feature.mode and self.feature.mode != image.mode:
            check_size(image)
            image = image.convert(self.feature.mode)
        return image


class SubsetImages:
    """The images of another set at `indices`."""

    def __init__(self, whole: ImageSet, indices: Sequence[int]) -> None:
        self.whole, self.indices, self.classes = whole, list(indices), whole.classes

    def __len__(self) -> int:
        return len(self.indices)

    def picture(self, index: int) -> tuple[Pixels, int]:
        return self.whole.picture(self.indices[index])


def decode_file(path: Path) -> Pixels:
    """Return the pixels of an image file, [H, W, 1] or [H, W, 3]."""
    from PIL import Image

    return decode(path, lambda: Image.open(path))


def decode(name: Any, read: Callable[[], Any]) -> Pixels:
    """Decode the Pillow image that `read` opens; errors call it `name`."""
    silence_size_warning()
    try:
        image = read()
        if image is None:
            raise ValueError("it is missing")
        with image:
            check_size(image)
            return read_pixels(image)
    except FileNotFoundError:
        raise CorruptImageError(f"{name} does not exist") from None
    except MemoryError:
        raise
    except Exception as error:  # on a damaged file Pillow can raise anything, such as struct.error
        reason = one_line(error)
        raise CorruptImageError(f"{name} cannot be read as an image: {reason}") from None


@cache
def silence_size_warning() -> None:
    """Pillow only warns about images up to twice its limit; `check_size` refuses them."""
    from PIL import Image

    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def check_size(image: Any) -> None:
    """Refuse a large image before it is decoded, which takes up to 4 bytes per pixel."""
    from PIL import Image

    limit, pixels = Image.MAX_IMAGE_PIXELS, image.width * image.height
    if limit is not None and pixels > limit:
        raise ValueError(
            f"it has {image.width} x {image.height} pixels, more than the limit of {limit:,}; "
            "shrink it, or raise PIL.Image.MAX_IMAGE_PIXELS"
        )


def read_pixels(image: Any) -> Pixels:
    """Return `to_pixels` of a Pillow image, upright by its EXIF orientation. An image of more than
    MAX_PIXELS is downscaled by an integer factor."""
    from PIL import ImageOps

    if (factor := downscale_factor(image)) > 1:
        # JPEG decodes to the next larger size it supports; other formats ignore this.
        image.draft(None, (image.width // factor, image.height // factor))
    ImageOps.exif_transpose(image, in_place=True)
    if (factor := downscale_factor(image)) == 1:
        return to_pixels(image)
    strips = []
    for top in range(0, image.height, STRIP_ROWS * factor):
        bottom = min(top + STRIP_ROWS * factor, image.height)
        strip = to_pillow(to_pixels(image.crop((0, top, image.width, bottom)))).reduce(factor)
        strips.append(np.asarray(strip).reshape(strip.height, strip.width, -1))
    return np.concatenate(strips)


def downscale_factor(image: Any) -> int:
    """Return the smallest integer factor that leaves at most MAX_PIXELS."""
    return max(1, math.ceil(math.sqrt(image.width * image.height / MAX_PIXELS)))


def check_policy(on_corrupt: str) -> None:
    if on_corrupt not in POLICIES:
        raise DataError(f"on_corrupt={on_corrupt!r} is unknown; choose {' or '.join(POLICIES)}")
