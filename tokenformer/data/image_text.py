"""Sets of images with captions or conversations, decoded on access.

A sample is an `ImageText`: images and turns of text. An image with several captions makes as many
samples. `on_corrupt` is the policy of `data/images`: with `skip` the next readable sample takes the
place of one with an unreadable image, the same one on every run.
"""

from collections.abc import Callable, Sequence
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
        texts = column(rows, self.columns.text)
        # Which caption of which row each sample is.
        self.samples = [
            (row, caption)
            for row, text in enumerate(texts)
            for caption in range(caption_count(text, self.columns.is_chat))
        ]
        if not self.samples:
            raise DataError(f"column {self.columns.text} of {name} holds no text")

    def __len__(self) -> int:
        return len(self.samples)

    def sample(self, index: int) -> ImageText:
        """Return a sample; with `on_corrupt="skip"` the next readable one."""
        for offset in range(min(len(self), MAX_SKIPPED_IN_A_ROW)):
            row, caption = self.samples[(index + offset) % len(self)]
            try:
                return self.read(row, caption)
            except CorruptImageError as error:
                self.handle(row, error)
        raise DataError(f"sample {index} of {self.name} and all after it cannot be read")

    def read(self, row: int, caption: int) -> ImageText:
        found = self.rows[row]
        text = found[self.columns.text]
        turns = (
            read_turns(f"row {row} of {self.name}", text)
            if self.columns.is_chat
            else [Turn(CAPTION, as_list(text)[caption].strip())]
        )
        images = [self.decode(row, stored) for stored in as_list(found[self.columns.image])]
        marked = sum(turn.text.count(IMAGE_TOKEN) for turn in turns)
        if marked == 0 and images:
            first = turns[0]
            turns = [Turn(first.role, IMAGE_TOKEN * len(images) + first.text), *turns[1:]]
        elif marked != len(images):
            raise DataError(
                f"row {row} of {self.name} has {marked} times {IMAGE_TOKEN} for {len(images)} "
                "images"
            )
        return ImageText(images, turns)

    def captions(self, row: int) -> list[str]:
        """Return all captions of a row, the references of an evaluation."""
        if self.columns.is_chat:
            raise DataError(f"{self.name} holds conversations, not captions")
        return [text.strip() for text in as_list(self.rows[row][self.columns.text])]

    def image(self, row: int) -> Pixels:
        """Return the first image of a row."""
        stored = as_list(self.rows[row][self.columns.image])
        if not stored:
            raise DataError(f"row {row} of {self.name} has no image")
        return self.decode(row, stored[0])

    def decode(self, row: int, stored: Any) -> Pixels:
        return decode(f"row {row} of {self.name}", lambda: self.open(stored))

    def open(self, stored: Any) -> Any:
        from PIL import Image

        if isinstance(stored, dict) and stored.get("bytes") is not None:
            return Image.open(BytesIO(stored["bytes"]))
        path = stored.get("path") if isinstance(stored, dict) else stored
        if not isinstance(path, str) or self.folder is None:
            raise ValueError("it is missing")
        home = self.folder.resolve()
        file = (home / path).resolve()
        if not file.is_relative_to(home):
            raise ValueError(f"its path {path} leaves the folder {self.folder}")
        return Image.open(file)


class SubsetImageText:
    """The samples of another set whose rows are `rows`."""

    def __init__(self, whole: ImageTextSet, rows: Sequence[int]) -> None:
        kept = set(rows)
        self.whole = whole
        self.indices = [i for i, (row, _) in enumerate(whole.samples) if row in kept]

    def __len__(self) -> int:
        return len(self.indices)

    def sample(self, index: int) -> ImageText:
        return self.whole.sample(self.indices[index])


def column_names(rows: Any) -> list[str]:
    names = getattr(rows, "column_names", None)
    return list(rows[0]) if names is None else list(names)


def column(rows: Any, name: str) -> list[Any]:
    if hasattr(rows, "column_names"):
        return list(rows[name])
    return [row.get(name) for row in rows]


def caption_count(text: Any, is_chat: bool) -> int:
    if is_chat:
        return int(bool(text))
    return sum(isinstance(each, str) for each in as_list(text))


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
