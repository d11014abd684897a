"""Text files in any encoding as streams of UTF-8, and the options for reading a corpus.

    with source.open() as (stream, file): ...        # UTF-8, whatever the file's encoding

Text is converted to UTF-8 block by block while it is read. A byte order mark selects the encoding
of a file; without one it is `ReadOptions.encoding`, by default UTF-8. Bytes that are invalid in
that encoding, and zero bytes, which occur only in binary files and UTF-16, are an error that gives
the file and the offset.
"""

import codecs
import io
from dataclasses import dataclass
from typing import IO, Any

from tokenformer.errors import DataError

UTF8 = "utf-8"
RAW = "raw"
BYTE_ORDER_MARKS = (  # UTF-32 first: its mark begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, UTF8),
)
LONGEST_MARK = 4
BUFFER_BYTES = 1 << 18
SLICE = 1 << 13  # bytes decoded at once, small enough for a core's cache
ERRORS = ("strict", "replace")
REMEDIES = (
    "replace such bytes with --encoding_errors replace or, with --tokenizer bytes, keep them with "
    f"--encoding {RAW}"
)


class NotTextError(DataError):
    """Bytes that are invalid in the encoding of a file."""


@dataclass(frozen=True)
class ReadOptions:
    """Encoding and limits of the files of a corpus."""

    encoding: str | None = None
    """Encoding of files without a byte order mark; None is UTF-8, `raw` keeps all bytes."""
    errors: str = "strict"
    """`strict` refuses invalid bytes, `replace` turns them into U+FFFD."""
    max_ratio: float = 100.0
    """Largest ratio of unpacked to compressed size of a file; 0 for no limit."""
    max_row_bytes: int = 1 << 28
    """Largest line of jsonl, or text of a row."""

    def check(self) -> None:
        if self.errors not in ERRORS:
            raise DataError(f"--encoding_errors {self.errors} must be {' or '.join(ERRORS)}")
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
                f"--encoding {self.encoding} is not known; use a Python encoding such as latin-1 "
                f"or utf-16-le, or {RAW}"
            ) from None

    @property
    def allows_zero_bytes(self) -> bool:
        """Whether text in this encoding may contain zero bytes."""
        name = (self.encoding or UTF8).lower().replace("_", "-")
        return name == RAW or name.startswith(("utf-16", "utf16", "utf-32", "utf32"))


DEFAULT_READ_OPTIONS = ReadOptions()


def detect_byte_order_mark(start: bytes) -> tuple[str | None, int]:
    """Return the encoding that the byte order mark at the start of a file indicates, or None, and
    the length of the mark."""
    for mark, encoding in BYTE_ORDER_MARKS:
        if start.startswith(mark):
            return encoding, len(mark)
    return None, 0


def as_utf8(stream: IO[bytes], name: str, options: ReadOptions) -> io.BufferedReader:
    """Convert a stream to UTF-8 while it is read; errors call it `name`."""
    return io.BufferedReader(Utf8Stream(stream, name, options), buffer_size=BUFFER_BYTES)


class Utf8Stream(io.RawIOBase):
    def __init__(self, stream: IO[bytes], name: str, options: ReadOptions) -> None:
        self.stream, self.name, self.options = stream, name, options
        start = b""
        while len(start) < LONGEST_MARK and (block := stream.read(LONGEST_MARK - len(start))):
            start += block
        self.raw = options.encoding == RAW
        marked, mark = (None, 0) if self.raw else detect_byte_order_mark(start)
        self.encoding = marked or options.encoding or UTF8
        # Python's decoders of UTF-16 and UTF-32 read the mark themselves.
        self.pending = start[mark:] if marked == UTF8 else start
        self.bytes_read = len(start)
        self.verbatim = self.raw or (
            codecs.lookup(self.encoding).name == UTF8 and options.errors == "strict"
        )
        """Whether the output equals the input."""
        self.decoder: Any = None
        if not self.raw:
            self.decoder = codecs.getincrementaldecoder(self.encoding)(options.errors)
        self.converted = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.converted:
            block, self.pending = self.pending, b""
            if not block:
                block = self.stream.read(len(buffer))
                self.bytes_read += len(block)
            self.converted = memoryview(self.convert(block))
            if not block:
                break
        size = min(len(self.converted), len(buffer))
        buffer[:size] = self.converted[:size]
        self.converted = self.converted[size:]
        return size

    def convert(self, block: bytes) -> bytes:
        """Convert a block of the stream to UTF-8; an empty block is the end."""
        if self.raw:
            return block
        if self.verbatim:
            if b"\0" in block:
                raise NotTextError(self.zero_byte_message(block))
            for start in range(0, len(block) or 1, SLICE):
                self.decode(block[start : start + SLICE], len(block) - start - SLICE)
            return block
        text = self.decode(block)
        if "\0" in text:
            if self.options.errors == "strict":
                raise NotTextError(self.zero_byte_message(block))
            text = text.replace("\0", "\N{REPLACEMENT CHARACTER}")
        return text.encode(UTF8, errors="replace")

    def decode(self, part: bytes, after: int = 0) -> str:
        """Decode the next part, which ends `after` bytes before the end of what was read."""
        try:
            return str(self.decoder.decode(part, not part))
        except UnicodeError as error:
            raise NotTextError(self.invalid_bytes_message(error, max(0, after))) from None

    def invalid_bytes_message(self, error: UnicodeError, after: int) -> str:
        example = " (for example latin-1)" if self.encoding == UTF8 else ""
        remedy = f"set its encoding with --encoding{example}, {REMEDIES}"
        if not isinstance(error, UnicodeDecodeError):
            return f"{self.name} is not {self.encoding}: {error}; {remedy}"
        # The decoder's input ends `after` bytes before the end of what was read.
        offset = self.bytes_read - after - len(error.object) + error.start
        byte = error.object[error.start]
        return f"{self.name} is not {self.encoding}: byte 0x{byte:02x} at offset {offset}; {remedy}"

    def zero_byte_message(self, block: bytes) -> str:
        place = block.find(b"\0") if self.encoding == UTF8 else 0
        where = "at" if self.encoding == UTF8 else "at or after"
        return (
            f"{self.name} has a zero byte {where} offset {self.bytes_read - len(block) + place}, "
            f"so it is binary or UTF-16 (--encoding utf-16-le); remove it, {REMEDIES}"
        )
