"""Compressed files as streams of bytes: gzip, bzip2, xz, zstandard and members of zip archives.

Nothing is unpacked to disk, and the names of archive members are never used as paths. A truncated
or damaged file raises DataError, and so does a decompression bomb: a file that unpacks to far more
than its size.
"""

import bz2
import gzip
import io
import lzma
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from tokenformer.errors import DataError

SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
READ_ERRORS = (
    EOFError,
    OSError,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
    NotImplementedError,
)
MIN_LIMIT = 1 << 24
"""Bytes that any file may unpack to: a small file may be all repetition."""


class OpenFile(NamedTuple):
    stream: IO[bytes]
    """The decompressed content."""
    file: IO[bytes]
    """The file on disk; its `tell` gives the progress."""


def strip_suffixes(name: str) -> str:
    """Remove compression suffixes from a name: a.jsonl.zst -> a.jsonl."""
    path = PurePosixPath(name)
    while path.suffix.lower() in SUFFIXES:
        path = path.with_suffix("")
    return str(path)


class LimitedStream(io.RawIOBase):
    """A stream of decompressed bytes that raises DataError beyond the decompression limit."""

    def __init__(self, stream: IO[bytes], name: str, packed: int, max_ratio: float) -> None:
        self.stream, self.name, self.packed, self.max_ratio = stream, name, packed, max_ratio
        self.left = max(MIN_LIMIT, packed * max_ratio)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = self.stream.read(len(buffer))
        self.left -= len(block)
        if self.left < 0:
            raise DataError(limit_message(self.name, self.packed, self.max_ratio))
        buffer[: len(block)] = block
        return len(block)


def limit_message(name: str, packed: int, max_ratio: float) -> str:
    return (
        f"{name} unpacks to more than {max_ratio:g} times its size of {packed:,} bytes; if you "
        f"trust it, raise the limit with --max_ratio {max_ratio * 10:g}, or turn it off with "
        "--max_ratio 0"
    )


@contextmanager
def open_decompressed(
    path: Path, member: str | None = None, max_ratio: float = 0
) -> Iterator[OpenFile]:
    """Open a file, or a member of a zip archive, and decompress it while reading.

    The content may be at most `max_ratio` times the compressed size, or MIN_LIMIT if that is more;
    0 means no limit.
    """
    name = str(path) if member is None else f"{path}/{member}"
    with ExitStack() as stack, read_errors(name):
        file = stack.enter_context(path.open("rb"))
        stream: IO[bytes] = file
        packed = path.stat().st_size
        if member is not None:
            try:
                archive = stack.enter_context(zipfile.ZipFile(file))
                packed = archive.getinfo(member).compress_size
                stream = stack.enter_context(archive.open(member))
            except RuntimeError as error:  # encrypted
                raise DataError(f"{name} cannot be read: {error}") from None
        left = PurePosixPath(member or path.name)
        while left.suffix.lower() in SUFFIXES:
            stream = stack.enter_context(decompress(stream, left.suffix.lower()))
            left = left.with_suffix("")
        if max_ratio and stream is not file:
            stream = io.BufferedReader(LimitedStream(stream, name, packed, max_ratio), 1 << 18)
        yield OpenFile(stream, file)


@contextmanager
def read_errors(name: str) -> Iterator[None]:
    """Raise errors of reading `name` as a DataError of one line that names it."""
    try:
        yield
    except DataError:
        raise
    except READ_ERRORS as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise DataError(f"{name} cannot be read: {reason}") from None


def decompress(stream: IO[bytes], suffix: str) -> IO[bytes]:
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=stream)  # type: ignore[return-value]
    if suffix == ".bz2":
        return bz2.BZ2File(stream)
    if suffix == ".xz":
        return lzma.LZMAFile(stream)
    import pyarrow

    # Unlike zstandard's own reader, it raises an error if a frame is truncated.
    inner = pyarrow.CompressedInputStream(pyarrow.PythonFile(stream, mode="r"), "zstd")
    return io.BufferedReader(inner, buffer_size=1 << 20)


def archive_members(path: Path) -> list[tuple[str, int]]:
    """Return the files of a zip archive, sorted by name, with their unpacked sizes."""
    with read_errors(str(path)), zipfile.ZipFile(path) as archive:
        files = [entry for entry in archive.infolist() if not entry.is_dir()]
        if sum(entry.compress_size for entry in files) > path.stat().st_size:
            raise DataError(f"{path} has members that overlap; it is damaged or malicious")
        return sorted((entry.filename, entry.file_size) for entry in files)
