"""Sets of images with captions or conversations, decoded on access.

A sample is an `ImageText`: images and turns of text. An image with several captions makes as many
samples, and several rows may show the same image (`groups`). `on_corrupt` is the policy of
`data/images`: with `skip` the next readable sample takes the place of one with an unreadable image,
the same one on every run.
"""

import hashlib
import posixpath
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from tokenformer.data.images import (
    MAX_SKIPPED_IN_A_ROW,
    CorruptImageError,
    CorruptPolicy,
    decode,
)
from tokenformer.errors import DataError
from tokenformer.models.pixels import Pixels

CAPTION = "caption"
ASSISTANT = "assistant"
IMAGE_TOKEN = "<image>"
ROLES = {"human": "user", "gpt": ASSISTANT, "bot": ASSISTANT}
"""The names of LLaVA's data for the roles of a chat."""
IMAGE_COLUMNS = ("image", "images", "jpg", "png")
CAPTION_COLUMNS = ("captions", "caption", "texts", "text", "sentences", "txt")
CHAT_COLUMNS = ("messages", "conversations", "conversation")


@dataclass(frozen=True)
class Turn:
    """Text by one speaker; `role` is user, assistant, system or, of a caption, `caption`."""

    role: str
    text: str

    @property
    def is_target(self) -> bool:
        """Whether the model learns to write it."""
        return self.role in (CAPTION, ASSISTANT)


@dataclass(frozen=True)
class ImageText:
    images: list[Pixels]
    turns: list[Turn]
    """`<image>` in the text of a turn marks the place of the next image."""


@dataclass(frozen=True)
class Columns:
    """The columns of a table that hold images, and captions or conversations."""

    image: str
    text: str
    is_chat: bool

    @classmethod
    def find(cls, name: str, columns: Sequence[str]) -> "Columns":
        image = next((column for column in IMAGE_COLUMNS if column in columns), None)
        chat = next((column for column in CHAT_COLUMNS if column in columns), None)
        text = chat or next((column for column in CAPTION_COLUMNS if column in columns), None)
        if image is None or text is None:
            raise DataError(
                f"{name} needs a column of images ({', '.join(IMAGE_COLUMNS)}) and one of captions "
                f"({', '.join(CAPTION_COLUMNS)}) or conversations ({', '.join(CHAT_COLUMNS)}); it "
                f"has {', '.join(columns)}"
            )
        return cls(image, text, chat is not None)


class ImageTextSet(CorruptPolicy):
    """The rows of a table, such as a Hugging Face dataset or a list of dicts.

    An image is a dict with `bytes` or `path`, as `datasets` stores it, or a path. Paths are
    relative to `folder` and must stay inside it.
    """

    def __init__(
        self, name: str, rows: Any, folder: Path | None = None, on_corrupt: str = "refuse"
    ) -> None:
        super().__init__(on_corrupt)
        if not len(rows):
            raise DataError(f"{name} has no rows")
        self.name, self.rows, self.folder = name, rows, folder
        self.columns = Columns.find(name, column_names(rows))
        text, is_chat = self.columns.text, self.columns.is_chat
        # Which text of which row each sample is.
        self.samples = [
            (row, caption)
            for row, found in enumerate(select_column(rows, text))
            for caption in range(caption_count(found.get(text), is_chat))
        ]
        if not self.samples:
            raise DataError(f"column {self.columns.text} of {name} holds no text")

    def __len__(self) -> int:
        return len(self.samples)

    def sample(self, index: int) -> ImageText:
        """Return a sample; with `on_corrupt="skip"` the next readable one."""
        return self.first_readable(range(len(self)), index)

    def first_readable(self, indices: Sequence[int], place: int) -> ImageText:
        """Return the sample at a place among `indices`, or by the policy the next of them."""
        count = len(indices)
        for offset in range(min(count, MAX_SKIPPED_IN_A_ROW)):
            row, caption = self.samples[indices[(place + offset) % count]]
            try:
                return self.read(row, caption)
            except CorruptImageError as error:
                self.handle(row, error)
        raise DataError(f"sample {indices[place]} of {self.name} and all after it cannot be read")

    def read(self, row: int, caption: int) -> ImageText:
        found = self.rows[row]
        stored = self.images(found)
        turns = self.turns(row, found, caption, len(stored))
        return ImageText([self.decode(row, each) for each in stored], turns)

    def turns(self, row: int, found: Any, caption: int, images: int) -> list[Turn]:
        """Return the text of a sample, whose row is `found`, with a mark for each of its images."""
        text = found.get(self.columns.text)
        turns = (
            read_turns(f"row {row} of {self.name}", text)
            if self.columns.is_chat
            else [Turn(CAPTION, caption_texts(text)[caption].strip())]
        )
        marked = sum(turn.text.count(IMAGE_TOKEN) for turn in turns)
        if marked == 0 and images:
            first = turns[0]
            turns = [Turn(first.role, IMAGE_TOKEN * images + first.text), *turns[1:]]
        elif marked != images:
            raise DataError(
                f"row {row} of {self.name} has {marked} times {IMAGE_TOKEN} for {images} images"
            )
        return turns

    def images(self, found: Any) -> list[Any]:
        """Return the images of a row as they are stored. A row may have none: mixes for instruction
        tuning leave the column out where there is only text."""
        return [each for each in as_list(found.get(self.columns.image)) if each is not None]

    def captions(self, row: int) -> list[str]:
        """Return all captions of a row, the references of an evaluation."""
        if self.columns.is_chat:
            raise DataError(f"{self.name} holds conversations, not captions")
        texts = caption_texts(self.rows[row].get(self.columns.text))
        return [text.replace(IMAGE_TOKEN, "").strip() for text in texts]

    def image(self, row: int) -> Pixels:
        """Return the first image of a row."""
        stored = self.images(self.rows[row])
        if not stored:
            raise DataError(f"row {row} of {self.name} has no image")
        return self.decode(row, stored[0])

    def groups(self, most: int | None = None) -> list[list[int]]:
        """Return the rows that show the same image, by its path or bytes, in the order of their
        first rows. A row without an image is a group of its own. `most` is the number of images of
        a row that count."""
        rows = select_column(self.rows, self.columns.image)
        return group_rows([image_key(each) for each in self.images(row)[:most]] for row in rows)

    def decode(self, row: int, stored: Any) -> Pixels:
        return decode(self.image_name(row, stored), lambda: self.open(stored))

    def image_name(self, row: int, stored: Any) -> str:
        """The name of an image in messages."""
        path = stored.get("path") if isinstance(stored, dict) else stored
        which = f"image {path}" if isinstance(path, str) else "the image"
        return f"{which} of row {row} of {self.name}"

    def open(self, stored: Any) -> Any:
        from PIL import Image

        return Image.open(self.find(stored))

    def find(self, stored: Any) -> BytesIO | Path:
        """Return the bytes or the file of an image."""
        if (content := stored_bytes(stored)) is not None:
            return BytesIO(content)
        path = stored.get("path") if isinstance(stored, dict) else stored
        if not isinstance(path, str) or self.folder is None:
            raise ValueError("it is missing")
        home = self.folder.resolve()
        file = (home / path).resolve()
        if not file.is_relative_to(home):
            raise ValueError(f"its path {path} leaves the folder {self.folder}")
        return file


class SubsetImageText:
    """The samples of another set whose rows are `rows`."""

    def __init__(self, whole: ImageTextSet, rows: Sequence[int]) -> None:
        kept = set(rows)
        self.whole = whole
        self.indices = [i for i, (row, _) in enumerate(whole.samples) if row in kept]

    def __len__(self) -> int:
        return len(self.indices)

    def sample(self, index: int) -> ImageText:
        return self.whole.first_readable(self.indices, index)


def column_names(rows: Any) -> list[str]:
    """Return the columns of a dataset, or the keys that rows of a list have, not all the same."""
    names = getattr(rows, "column_names", None)
    return list(dict.fromkeys(key for row in rows for key in row)) if names is None else list(names)


def select_column(rows: Any, name: str) -> Iterable[Any]:
    """Return the rows with this column alone, which are read one by one."""
    return rows.select_columns([name]) if hasattr(rows, "select_columns") else rows


def caption_count(text: Any, is_chat: bool) -> int:
    return int(bool(text)) if is_chat else len(caption_texts(text))


def caption_texts(text: Any) -> list[str]:
    """Return the captions of a row, without those that are missing."""
    return [each for each in as_list(text) if isinstance(each, str)]


def stored_bytes(stored: Any) -> bytes | None:
    content = stored.get("bytes") if isinstance(stored, dict) else stored
    return content if isinstance(content, bytes) else None


def image_key(stored: Any) -> Any:
    """Return what is equal for the same image: a digest of its bytes, or its path."""
    if (content := stored_bytes(stored)) is not None:
        return digest(content)
    path = stored.get("path") if isinstance(stored, dict) else stored
    return posixpath.normpath(path) if isinstance(path, str) else None


def digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def group_rows(keys_by_row: Iterable[Sequence[Any]]) -> list[list[int]]:
    """Group rows that have a key in common, also through other rows; None is no key."""
    parents: list[int] = []
    first: dict[Any, int] = {}

    def root(row: int) -> int:
        while parents[row] != row:
            parents[row] = row = parents[parents[row]]
        return row

    for row, keys in enumerate(keys_by_row):
        parents.append(row)
        for key in keys:
            if key is not None:
                ends = root(first.setdefault(key, row)), root(row)
                parents[max(ends)] = min(ends)
    groups: dict[int, list[int]] = {}
    for row in range(len(parents)):
        groups.setdefault(root(row), []).append(row)
    return list(groups.values())


def as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def read_turns(name: str, messages: Any) -> list[Turn]:
    """Read a conversation in the format of chats (role, content) or of LLaVA (from, value)."""
    turns = []
    for message in as_list(messages):
        role = message.get("role", message.get("from")) if isinstance(message, dict) else None
        content = message.get("content", message.get("value")) if role is not None else None
        if not isinstance(role, str) or content is None:
            raise DataError(
                f"{name} has a message without role and content (or from and value): {message!r}"
            )
        turns.append(Turn(ROLES.get(role, role), read_content(name, content)))
    if not any(turn.is_target for turn in turns):
        raise DataError(f"{name} has no message of an {ASSISTANT}")
    return turns


def read_content(name: str, content: Any) -> str:
    """Return the text of a message, which may be a list of images and texts."""
    if isinstance(content, str):
        return content
    read: dict[str, Callable[[Any], str]] = {
        "image": lambda part: IMAGE_TOKEN,
        "text": lambda part: str(part["text"]),
    }
    try:
        return "".join(read[part["type"]](part) for part in content)
    except (KeyError, TypeError):
        raise DataError(f"{name} has a part that is neither text nor image: {content!r}") from None
