"""Atomic writes of files and folders, folder locks and file hashes.

A folder is filled under a hidden temporary name (`start_folder`) and renamed once all of it is on
disk (`finish_folder`), so a killed process never leaves a partial one under the final name.
"""

import ctypes
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

from tokenformer.errors import InputError

UNFINISHED, DELETED = "unfinished", "deleted"
"""Suffixes of temporary folders that are being filled or deleted."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems without locks."""


def write_atomic(path: Path, text: str) -> None:
    """Write a text file, complete or not at all. It is on disk when this returns."""
    unfinished = path.with_name(f".{path.name}.tmp")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()
        raise
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


OPEN: set[Path] = set()
"""Folders that `new_folder` deletes if the process stops now."""


@contextmanager
def new_folder(option: str, path: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` when the block ends and is deleted if it fails.

    An unusable path is refused before the work starts; `option` names it in the message.
    """
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise InputError(f"{option} {path} already exists; name a new folder")
        unfinished = start_folder(path, siblings=escape(path.name))
    except OSError as error:
        raise InputError(f"{option} {path} cannot be created: {error.strerror}") from None
    OPEN.add(unfinished)
    try:
        yield unfinished
        finish_folder(unfinished, path)
    except BaseException:
        discard_folder(unfinished)
        raise
    finally:
        OPEN.discard(unfinished)


def start_folder(path: Path, siblings: str) -> Path:
    """Create the empty temporary folder that `finish_folder` renames to `path`.

    First delete the temporary folders that killed processes left for names that match the glob
    pattern `siblings`, to free their disk space.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    delete_leftovers(path.parent, siblings, UNFINISHED, DELETED)
    unfinished = temporary_name(path, UNFINISHED)
    unfinished.mkdir()
    return unfinished


def delete_leftovers(parent: Path, names: str, *suffixes: str) -> None:
    """Delete the temporary folders that killed processes left in `parent`."""
    for suffix in suffixes:
        for leftover in parent.glob(f".{names}.{suffix}-*"):
            delete(leftover)


def finish_folder(unfinished: Path, path: Path) -> None:
    """Rename a filled folder to `path`, atomically replacing an existing folder."""
    for path_inside in unfinished.rglob("*"):
        fsync(path_inside)
    fsync(unfinished)
    try:
        unfinished.rename(path)  # also replaces an empty folder
    except OSError:
        if not os.path.lexists(path):
            raise
        swap_folders(unfinished, path)
        fsync(path.parent)
        discard_folder(unfinished)  # it now holds the older contents
    fsync(path.parent)


def discard_folder(unfinished: Path) -> None:
    """Delete a temporary folder. The next `start_folder` deletes whatever cannot be deleted now."""
    # `ignore_errors` instead of `suppress(OSError)`: an interrupt inside rmtree may surface as an
    # OSError, which must not be lost.
    shutil.rmtree(unfinished, ignore_errors=True)
    if os.path.lexists(unfinished) and not unfinished.is_dir():
        unfinished.unlink()


def remove_folder(path: Path) -> None:
    """Delete a folder that other processes must never see half deleted."""
    if path.exists():
        renamed = temporary_name(path, DELETED)
        path.rename(renamed)
        delete(renamed)


def delete(path: Path) -> None:
    """Delete a folder, or a file or link in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def temporary_name(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.{suffix}-{secrets.token_hex(4)}")


def swap_folders(one: Path, other: Path) -> None:
    """Swap two folders: atomically on Linux, elsewhere through a third name."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    at_working_folder, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    names = os.fsencode(one), os.fsencode(other)
    if renameat2 and not renameat2(at_working_folder, names[0], at_working_folder, names[1], swap):
        return
    between = temporary_name(other, UNFINISHED)
    other.rename(between)
    one.rename(other)
    between.rename(one)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder, created if needed, for the duration of a block.

    Raises BlockingIOError if another process holds it. The lock is released when the process ends
    for any reason. On file systems without locks this does nothing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield
    finally:
        os.close(handle)


def sha256(file: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def cache_folder() -> Path:
    """Return the folder for data that can be recomputed: in XDG_CACHE_HOME or ~/.cache.

    Raises OSError without a home folder, as in a container with an unknown user id.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenformer"
    except RuntimeError:
        raise FileNotFoundError(errno.ENOENT, "there is no home folder; set HOME") from None
