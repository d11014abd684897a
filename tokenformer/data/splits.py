"""Which split each document belongs to: by its hash, or by its position in one long text."""

import hashlib
from dataclasses import dataclass
from typing import IO

from tokenformer.data.compression import read_errors
from tokenformer.data.sources import Source

DEFAULT_FRACTION = 0.05  # of documents held out; the paper's, on OpenWebText
STANDARD_SIZE = 100_000_000  # of enwik8 and text8, whatever their name and compression
SEARCH_BYTES = 1 << 18

Boundaries = tuple[tuple[str | None, int | None], ...]
"""The splits of one long text, each with the byte offset where it ends; None is the end of the
text."""
STANDARD_BOUNDARIES: Boundaries = (
    ("train", 90_000_000),
    ("validation", 95_000_000),
    ("test", None),
)
UNSPLIT: Boundaries = ((None, None),)


@dataclass
class HashSplit:
    """Holds out the documents whose hash is below a threshold.

    The hash covers the seed and the first block of the text. So the split depends neither on the
    order of documents nor on the number of processes, and copies of a text are in the same split.
    """

    seed: int
    threshold: int

    @classmethod
    def from_fraction(cls, fraction: float, seed: int) -> "HashSplit":
        return cls(seed, int(fraction * 2**64))

    def hash(self, text: bytes) -> int:
        digest = hashlib.blake2b(text, digest_size=8, key=self.seed.to_bytes(8, "little"))
        return int.from_bytes(digest.digest(), "little")

    def is_held_out(self, text: bytes) -> bool:
        return self.hash(text) < self.threshold


def text_boundaries(source: Source, fraction: float | None, *, standard: bool = True) -> Boundaries:
    """Return the splits of a corpus whose training text is a single file: the standard ones if it
    has the standard size and no fraction is given, else its end is held out, from the start of a
    line."""
    size = content_size(source)
    if standard and size == STANDARD_SIZE and fraction is None:
        return STANDARD_BOUNDARIES
    held_out = DEFAULT_FRACTION if fraction is None else fraction
    if not held_out:
        return (("train", None),)
    return (("train", line_start(source, size - int(size * held_out))), ("validation", None))


def content_size(source: Source) -> int:
    """Bytes of a source's text in UTF-8."""
    if source.is_plain():
        return source.size
    with read_errors(source.name), source.open() as (stream, _):
        size = 0
        while block := stream.read(1 << 20):
            size += len(block)
        return size


def line_start(source: Source, offset: int) -> int:
    """Return the start of the first line at or after `offset`, or `offset` if there is none
    near."""
    before = max(0, offset - 1)  # if this byte is a line break, a line starts at `offset`
    with read_errors(source.name), source.open() as (stream, file):
        if source.is_plain():
            file.seek(before)
            stream = file
        else:
            skip(stream, before)
        text = b""
        while len(text) < SEARCH_BYTES and (block := stream.read(SEARCH_BYTES - len(text))):
            text += block
    found = text.find(b"\n")
    if 0 <= found < len(text) - 1:
        return before + found + 1
    start = offset - before
    while start < len(text) and text[start] & 0xC0 == 0x80:  # inside a UTF-8 character
        start += 1
    return before + start


def skip(stream: IO[bytes], size: int) -> None:
    while size and (block := stream.read(min(size, 1 << 20))):
        size -= len(block)
