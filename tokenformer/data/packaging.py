"""Files as streams of bytes, whatever they are packed in: gzip, bzip2, xz, zstandard, zip.

Nothing is ever unpacked to disk: a member of an archive is read as a stream, and its name is only
a name. A file that ends too early or is damaged raises DataError; it is never taken for whole. So
does one that unpacks to far more than its size, such as a decompression bomb.
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

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, NotImplementedError)
ALWAYS_ALLOWED = 1 << 24
"""Bytes that a file may unpack to whatever its size: a small file may be all repetition."""


class Unpacked(NamedTuple):
    stream: IO[bytes]
    """The content."""
    file: IO[bytes]
    """The file on disk under it, whose `tell` says how much of it has been read."""


def bare_name(name: str) -> str:
    """The name without the suffixes of compression: a.jsonl.zst -> a.jsonl."""
    path = PurePosixPath(name)
    while path.suffix.lower() in COMPRESSIONS:
        path = path.with_suffix("")
    return str(path)


class Limited(io.RawIOBase):
    """A stream of unpacked bytes that ends in an error where there are too many of them."""

    def __init__(self, stream: IO[bytes], name: str, packed: int, max_ratio: float) -> None:
        self.stream, self.name, self.packed, self.max_ratio = stream, name, packed, max_ratio
        self.left = max(ALWAYS_ALLOWED, packed * max_ratio)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = self.stream.read(len(buffer))
        self.left -= len(block)
        if self.left < 0:
            raise DataError(too_much(self.name, self.packed, self.max_ratio))
        buffer[: len(block)] = block
        return len(block)


def too_much(name: str, packed: int, max_ratio: float) -> str:
    return (
        f"{name} unpacks to more than {max_ratio:g} times its size of {packed:,} bytes; if you "
        f"trust it, allow more by --max_ratio {max_ratio * 10:g}, or anything by --max_ratio 0"
    )


@contextmanager
def unpacked(path: Path, member: str | None = None, max_ratio: float = 0) -> Iterator[Unpacked]:
    """The content of a file, or of a member of a zip archive: at most `max_ratio` times its size,
    or ALWAYS_ALLOWED if that is more; with 0, whatever there is."""
    name = str(path) if member is None else f"{path}/{member}"
    with ExitStack() as stack, readable(name):
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
        while left.suffix.lower() in COMPRESSIONS:
            stream = stack.enter_context(decompressed(stream, left.suffix.lower()))
            left = left.with_suffix("")
        if max_ratio and stream is not file:
            stream = io.BufferedReader(Limited(stream, name, packed, max_ratio), 1 << 18)
        yield Unpacked(stream, file)


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Errors of reading `name`, in one line that names it."""
    try:
        yield
    except DataError:
        raise
    except DAMAGE as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise DataError(f"{name} cannot be read to its end: {reason}") from None


def decompressed(stream: IO[bytes], suffix: str) -> IO[bytes]:
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=stream)  # type: ignore[return-value]
    if suffix == ".bz2":
        return bz2.BZ2File(stream)
    if suffix == ".xz":
        return lzma.LZMAFile(stream)
    import pyarrow

    # Unlike zstandard's own reader it raises where a frame is cut short.
    inner = pyarrow.CompressedInputStream(pyarrow.PythonFile(stream, mode="r"), "zstd")
    return io.BufferedReader(inner, buffer_size=1 << 20)


def archive_members(path: Path) -> list[tuple[str, int]]:
    """The files of a zip archive, sorted by name, with their unpacked sizes."""
    with readable(str(path)), zipfile.ZipFile(path) as archive:
        files = [entry for entry in archive.infolist() if not entry.is_dir()]
        if sum(entry.compress_size for entry in files) > path.stat().st_size:
            raise DataError(f"{path} has members that overlap; it is damaged, or made to harm")
        return sorted((entry.filename, entry.file_size) for entry in files)
