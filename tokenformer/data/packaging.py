"""Files as streams of bytes, whatever they are packed in: gzip, bzip2, xz, zstandard, zip.

Nothing is ever unpacked to disk: a member of an archive is read as a stream, and its name is only
a name. A file that ends too early or is damaged raises DataError; it is never taken for whole.
"""

import bz2
import gzip
import lzma
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from tokenformer.data.errors import DataError

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, NotImplementedError)


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


@contextmanager
def unpacked(path: Path, member: str | None = None) -> Iterator[Unpacked]:
    """The content of a file, or of a member of a zip archive."""
    name = str(path) if member is None else f"{path}/{member}"
    with ExitStack() as stack, readable(name):
        file = stack.enter_context(path.open("rb"))
        stream: IO[bytes] = file
        if member is not None:
            try:
                archive = stack.enter_context(zipfile.ZipFile(file))
                stream = stack.enter_context(archive.open(member))
            except RuntimeError as error:  # encrypted
                raise DataError(f"{name} cannot be read: {error}") from None
        left = PurePosixPath(member or path.name)
        while left.suffix.lower() in COMPRESSIONS:
            stream = stack.enter_context(decompressed(stream, left.suffix.lower()))
            left = left.with_suffix("")
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
    import io

    import pyarrow

    # Unlike zstandard's own reader it raises where a frame is cut short.
    inner = pyarrow.CompressedInputStream(pyarrow.PythonFile(stream, mode="r"), "zstd")
    return io.BufferedReader(inner, buffer_size=1 << 20)


def archive_members(path: Path) -> list[tuple[str, int]]:
    """The files of a zip archive, sorted by name, with their unpacked sizes."""
    with readable(str(path)), zipfile.ZipFile(path) as archive:
        files = [entry for entry in archive.infolist() if not entry.is_dir()]
        return sorted((entry.filename, entry.file_size) for entry in files)
