"""Image sets: pictures by number, each with a class, whatever they are stored as.

    pictures = ArrayImages(pixels, labels, classes)     # in memory, all of one size
    pictures = FileImages(paths, labels, classes)       # decoded when asked for

A picture that cannot be decoded is refused by name, or with `on_corrupt="skip"` replaced by the
next one that can be, the same on every run; who was skipped is logged, and noted in `skipped`. One
of more pixels than Pillow's MAX_IMAGE_PIXELS counts as such: it is refused before it is decoded.
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

from tokenformer.errors import DataError

logger = logging.getLogger(__name__)

Pixels = npt.NDArray[np.uint8]
"""[H, W, C] of one picture, [N, H, W, C] of many; C is 1 or 3."""

LARGE = 1 << 24
"""Pixels; an image with more is reduced while it is decoded. Models take far fewer."""
STRIP = 64
"""Rows that are reduced at a time, so that a large image is not held twice."""
DEEP = ("I", "I;16", "I;16L", "I;16B", "I;16N")
"""Pillow's modes of grey images with 16 bits a pixel."""
POLICIES = ("refuse", "skip")
MOST_IN_A_ROW = 1000


class CorruptImageError(DataError):
    """A picture cannot be decoded."""


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


class DecodedImages:
    """Pictures that are decoded when asked for."""

    def __init__(self, labels: Sequence[Any], classes: Sequence[str], on_corrupt: str) -> None:
        check_policy(on_corrupt)
        self.labels, self.classes, self.on_corrupt = labels, list(classes), on_corrupt
        self.skipped: set[Any] = set()
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, place: int) -> Any:
        """What a picture is called where it cannot be read."""
        raise NotImplementedError

    def decode(self, place: int) -> Pixels:
        raise NotImplementedError

    def picture(self, index: int) -> tuple[Pixels, int]:
        for step in range(min(len(self), MOST_IN_A_ROW)):
            place = (index + step) % len(self)
            try:
                return self.decode(place), self.label(place)
            except CorruptImageError as error:
                if self.on_corrupt == "refuse":
                    raise
                self.skip(place, error)
        raise DataError(f"{self.name(index)} and all after it cannot be read as images")

    def label(self, place: int) -> int:
        label = self.labels[place]
        if label is None or not 0 <= label < len(self.classes):  # of a hidden test set, -1
            raise DataError(f"{self.name(place)} has the label {label}, which is no class")
        return int(label)

    def skip(self, place: int, error: DataError) -> None:
        """Told once for each picture, by whichever thread comes first."""
        with self.lock:
            known = self.name(place) in self.skipped
            self.skipped.add(self.name(place))
        if not known:
            logger.warning("%s; skipped", error)


class FileImages(DecodedImages):
    """Image files of any kind that Pillow reads, as colour or, where they are grey, as grey."""

    def __init__(
        self,
        paths: Sequence[Path],
        labels: Sequence[int],
        classes: Sequence[str],
        on_corrupt: str = "refuse",
    ) -> None:
        super().__init__(list(labels), classes, on_corrupt)
        self.paths = list(paths)

    def name(self, place: int) -> Path:
        return self.paths[place]

    def decode(self, place: int) -> Pixels:
        return decoded(self.paths[place])


class DatasetImages(DecodedImages):
    """A split of a Hugging Face dataset with a column of images and one of classes."""

    def __init__(self, rows: Any, image: str, label: str, on_corrupt: str = "refuse") -> None:
        labels = list(rows[label])
        names = getattr(rows.features[label], "names", None)
        if names is None and not all(isinstance(each, int) for each in labels):
            raise DataError(
                f"column {label} holds {rows.features[label].dtype} where numbers of classes are "
                "expected; `class_encode_column` of a dataset makes them"
            )
        super().__init__(labels, names or [str(n) for n in range(max(labels) + 1)], on_corrupt)
        self.feature = replace(rows.features[image], decode=True)
        self.rows, self.image = rows.cast_column(image, replace(self.feature, decode=False)), image

    def name(self, place: int) -> str:
        return f"row {place}"

    def decode(self, place: int) -> Pixels:
        return pixels_of(self.name(place), lambda: self.opened(place))

    def opened(self, place: int) -> Any:
        """The image, not yet decoded as `datasets` would: its size is checked first."""
        from PIL import Image

        stored = self.rows[place][self.image]
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

    return pixels_of(path, lambda: Image.open(path))


def pixels_of(name: Any, read: Callable[[], Any]) -> Pixels:
    from PIL import Image

    silence_warning()
    try:
        image = read()
        if image is None:
            raise ValueError("it is missing")
        with image:
            check_size(image)
            return in_channels(image)
    except FileNotFoundError:
        raise CorruptImageError(f"{name} does not exist") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CorruptImageError(f"{name} cannot be read as an image: {reason}") from None


@cache
def silence_warning() -> None:
    """Pillow only warns of images up to twice its limit; `check_size` refuses them."""
    from PIL import Image

    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def check_size(image: Any) -> None:
    """Of an image that is open but not yet decoded: decoding takes up to 4 bytes a pixel."""
    from PIL import Image

    most, pixels = Image.MAX_IMAGE_PIXELS, image.width * image.height
    if most is not None and pixels > most:
        raise ValueError(
            f"it has {image.width} x {image.height} pixels, more than the limit of {most:,}; "
            "make it smaller, or raise PIL.Image.MAX_IMAGE_PIXELS"
        )


def in_channels(image: Any) -> Pixels:
    """[H, W, 1] of a grey Pillow image, [H, W, 3] of any other, upright as its camera noted. One of
    more than LARGE pixels is reduced by a whole number."""
    from PIL import Image, ImageOps

    if (factor := reduction(image)) > 1:
        # A JPEG is decoded at the next size that is not smaller; other formats ignore this.
        image.draft(None, (image.width // factor, image.height // factor))
    ImageOps.exif_transpose(image, in_place=True)
    if (factor := reduction(image)) == 1:
        return channels_of(image)
    strips = []
    for top in range(0, image.height, STRIP * factor):
        bottom = min(top + STRIP * factor, image.height)
        pixels = channels_of(image.crop((0, top, image.width, bottom)))
        grey = pixels.shape[2] == 1
        strip = Image.fromarray(pixels[:, :, 0] if grey else pixels).reduce(factor)
        strips.append(np.asarray(strip).reshape(strip.height, strip.width, -1))
    return np.concatenate(strips)


def reduction(image: Any) -> int:
    """The least whole number by which the sides are divided so that LARGE pixels are enough."""
    return max(1, math.ceil(math.sqrt(image.width * image.height / LARGE)))


def channels_of(image: Any) -> Pixels:
    if image.mode in DEEP:
        # Pillow would cut off what is above 255, and leave nearly all white.
        return (np.clip(np.asarray(image), 0, 65535) // 256).astype(np.uint8)[:, :, None]
    grey = image.mode in ("L", "1")
    mode = "L" if grey else "RGB"
    pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    return pixels[:, :, None] if grey else pixels


def check_policy(on_corrupt: str) -> None:
    if on_corrupt not in POLICIES:
        raise DataError(f"on_corrupt={on_corrupt!r} is unknown; choose {' or '.join(POLICIES)}")
