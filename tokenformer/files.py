"""Files and folders that are written whole or not at all, locks, and hashes.

A folder is filled under a hidden name beside its own (`start_folder`) and renamed once all of it is
on the disk (`finish_folder`), so a killed process or machine never leaves half of one.
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
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def write_whole(path: Path, text: str) -> None:
    """Whole or not at all, and on the disk when this returns."""
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
    sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def new_folder(option: str, path: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `path` when the block ends and vanishes if it fails.

    A path that cannot be used is refused before the work, not after it.
    """
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise InputError(f"{option} {path} is in use; name a new folder")
        unfinished = start_folder(path, kin=escape(path.name))
    except OSError as error:
        raise InputError(f"{option} {path} cannot be made: {error.strerror}") from None
    try:
        yield unfinished
        finish_folder(unfinished, path)
    except BaseException:
        discard_folder(unfinished)
        raise


def start_folder(path: Path, kin: str) -> Path:
    """A new empty folder that is to become `path`.

    What killed processes left beside it, of names that match `kin`, is deleted first: a full disk
    has room again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep_folders(path.parent, kin, UNFINISHED, DELETED)
    unfinished = hidden(path, UNFINISHED)
    unfinished.mkdir()
    return unfinished


def sweep_folders(parent: Path, kin: str, *words: str) -> None:
    """Delete the hidden folders that killed processes left in `parent`."""
    for word in words:
        for leftover in parent.glob(f".{kin}.{word}-*"):
            delete(leftover)


def finish_folder(unfinished: Path, path: Path) -> None:
    """Give a filled folder its name; an older folder of that name vanishes in the same instant."""
    for path_inside in unfinished.rglob("*"):
        sync_path(path_inside)
    sync_path(unfinished)
    try:
        unfinished.rename(path)  # also over an empty folder
    except OSError:
        if not os.path.lexists(path):
            raise
        exchange(unfinished, path)
        sync_path(path.parent)
        discard_folder(unfinished)  # it holds the older one now
    sync_path(path.parent)


def discard_folder(unfinished: Path) -> None:
    """Delete a folder that will not be finished; what cannot be, the next `start` deletes."""
    # `ignore_errors` instead of `suppress(OSError)`: an interrupt inside of rmtree may leave it as
    # an OSError, which must not be lost.
    shutil.rmtree(unfinished, ignore_errors=True)
    if os.path.lexists(unfinished) and not unfinished.is_dir():
        unfinished.unlink()


def remove_folder(path: Path) -> None:
    """Delete a folder that is never seen half deleted."""
    if path.exists():
        doomed = hidden(path, DELETED)
        path.rename(doomed)
        delete(doomed)


def delete(path: Path) -> None:
    """Delete a folder, or the file or link that stands where a folder should."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def hidden(path: Path, word: str) -> Path:
    return path.with_name(f".{path.name}.{word}-{secrets.token_hex(4)}")


def exchange(one: Path, other: Path) -> None:
    """Swap two folders: at once where the system can (Linux), else by way of a third name."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    at_working_folder, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    names = os.fsencode(one), os.fsencode(other)
    if renameat2 and not renameat2(at_working_folder, names[0], at_working_folder, names[1], swap):
        return
    between = hidden(other, UNFINISHED)
    other.rename(between)
    one.rename(other)
    between.rename(one)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder, made if need be, for the length of a block; it is free again when the process
    ends, however it does. Raises BlockingIOError if another process holds it. Where the file system
    knows no locks, there is none."""
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
    """The hexadecimal SHA-256 of a file."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def cache_folder() -> Path:
    """Where this package keeps what it can compute again: under XDG_CACHE_HOME, or ~/.cache.
    An `OSError` where there is no home folder, as in a container with an unknown user id."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenformer"
    except RuntimeError:
        raise FileNotFoundError(errno.ENOENT, "there is no home folder; set HOME") from None
