"""How text is read: its encoding, and limits on what a file may unpack to.

    with source.opened() as (stream, file): ...        # UTF-8, whatever the file holds

Text becomes UTF-8 as it is read, block by block. A byte order mark says how a file is encoded;
without one it is `Reading.encoding`, by default UTF-8. Bytes that are not text in that encoding,
and zero bytes, which only binary files and UTF-16 have, are refused by file and offset.
"""

import codecs
import io
from dataclasses import dataclass
from typing import IO, Any

from tokenformer.errors import DataError

UTF8 = "utf-8"
RAW = "raw"
MARKS = (  # UTF-32 first: its mark begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, UTF8),
)
LONGEST_MARK = 4
BLOCK = 1 << 18
SLICE = 1 << 13  # bytes decoded at once; a larger one leaves the cache of a core
ERRORS = ("strict", "replace")
REMEDIES = (
    "replace such bytes by --encoding_errors replace or, with --tokenizer bytes, keep them by "
    f"--encoding {RAW}"
)


class NotTextError(DataError):
    """Bytes that are not text in the encoding that they are read in."""


@dataclass(frozen=True)
class Reading:
    encoding: str | None = None
    """Of text files without a byte order mark; None is UTF-8, `raw` keeps all bytes as they are."""
    errors: str = "strict"
    """strict, or replace by U+FFFD what is not text."""
    max_ratio: float = 100.0
    """A file may unpack to so many times its size; 0: to any size."""
    max_row_bytes: int = 1 << 28
    """Of a line of jsonl, or the text of a row."""

    def check(self) -> None:
        if self.errors not in ERRORS:
            raise DataError(f"--encoding_errors {self.errors} is not {' or '.join(ERRORS)}")
        if not self.max_ratio >= 0:
            raise DataError(f"--max_ratio {self.max_ratio} must be at least 0")
        if self.max_row_bytes < 1:
            raise DataError(f"--max_row_bytes {self.max_row_bytes} must be at least 1")
        if self.encoding in (None, RAW):
            return
        try:
            "a".encode(str(self.encoding))
            codecs.getincrementaldecoder(str(self.encoding))
        except (LookupError, ValueError):
            raise DataError(
                f"--encoding {self.encoding} is not known; give one that Python has, such as "
                f"latin-1 or utf-16-le, or {RAW}"
            ) from None

    @property
    def has_zero_bytes(self) -> bool:
        """Whether zero bytes are part of text in this encoding."""
        name = (self.encoding or UTF8).lower().replace("_", "-")
        return name == RAW or name.startswith(("utf-16", "utf16", "utf-32", "utf32"))


USUAL = Reading()


def marked_encoding(start: bytes) -> tuple[str | None, int]:
    """The encoding that a byte order mark at the start of a file names, and the mark's length."""
    for mark, encoding in MARKS:
        if start.startswith(mark):
            return encoding, len(mark)
    return None, 0


def as_utf8(stream: IO[bytes], name: str, reading: Reading) -> io.BufferedReader:
    """The bytes of a stream as UTF-8; `name` is what errors call it."""
    return io.BufferedReader(Utf8Stream(stream, name, reading), buffer_size=BLOCK)


class Utf8Stream(io.RawIOBase):
    def __init__(self, stream: IO[bytes], name: str, reading: Reading) -> None:
        self.stream, self.name, self.reading = stream, name, reading
        start = b""
        while len(start) < LONGEST_MARK and (block := stream.read(LONGEST_MARK - len(start))):
            start += block
        self.raw = reading.encoding == RAW
        marked, mark = (None, 0) if self.raw else marked_encoding(start)
        self.encoding = marked or reading.encoding or UTF8
        # Python's decoders of UTF-16 and UTF-32 read the mark themselves.
        self.waiting = start[mark:] if marked == UTF8 else start
        self.taken = len(start)
        """Bytes of the stream read so far."""
        self.verbatim = self.raw or (
            codecs.lookup(self.encoding).name == UTF8 and reading.errors == "strict"
        )
        """Whether what comes out is what goes in."""
        self.decoder: Any = None
        if not self.raw:
            self.decoder = codecs.getincrementaldecoder(self.encoding)(reading.errors)
        self.ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            block, self.waiting = self.waiting, b""
            if not block:
                block = self.stream.read(len(buffer))
                self.taken += len(block)
            self.ready = memoryview(self.checked(block))
            if not block:
                break
        size = min(len(self.ready), len(buffer))
        buffer[:size] = self.ready[:size]
        self.ready = self.ready[size:]
        return size

    def checked(self, block: bytes) -> bytes:
        """What a block of the stream is in UTF-8; an empty block is the end."""
        if self.raw:
            return block
        if self.verbatim:
            if b"\0" in block:
                raise NotTextError(self.binary(block))
            for start in range(0, len(block) or 1, SLICE):
                self.decoded(block[start : start + SLICE], len(block) - start - SLICE)
            return block
        text = self.decoded(block)
        if "\0" in text:
            if self.reading.errors == "strict":
                raise NotTextError(self.binary(block))
            text = text.replace("\0", "\N{REPLACEMENT CHARACTER}")
        return text.encode(UTF8, errors="replace")

    def decoded(self, part: bytes, after: int = 0) -> str:
        """The text of a part of what has been read, up to `after` bytes before its end."""
        try:
            return str(self.decoder.decode(part, not part))
        except UnicodeError as error:
            raise NotTextError(self.not_text(error, max(0, after))) from None

    def not_text(self, error: UnicodeError, after: int) -> str:
        example = " (for example latin-1)" if self.encoding == UTF8 else ""
        remedy = f"give its encoding by --encoding{example}, {REMEDIES}"
        if not isinstance(error, UnicodeDecodeError):
            return f"{self.name} is not {self.encoding}: {error}; {remedy}"
        # What the decoder was given ends `after` bytes before the end of what has been read.
        offset = self.taken - after - len(error.object) + error.start
        byte = error.object[error.start]
        return f"{self.name} is not {self.encoding}: byte 0x{byte:02x} at offset {offset}; {remedy}"

    def binary(self, block: bytes) -> str:
        place = block.find(b"\0") if self.encoding == UTF8 else 0
        where = "at" if self.encoding == UTF8 else "at or after"
        return (
            f"{self.name} has a zero byte {where} offset {self.taken - len(block) + place}, so it "
            f"is not text, or it is UTF-16 (--encoding utf-16-le); remove it, {REMEDIES}"
        )
