"""A folder on disk that is there whole or not at all, whenever the process or the machine dies.

It is filled under a hidden name beside its own (`start`), and takes its place once every byte of it
is on the disk (`finish`).
"""

import ctypes
import os
import secrets
import shutil
from pathlib import Path

from tokenformer.data.shards import sync_path

UNFINISHED, DELETED = "unfinished", "deleted"


def start(path: Path, kin: str) -> Path:
    """A new empty folder that is to become `path`.

    What killed processes left beside it, of names that match `kin`, is deleted first: a full disk
    has room again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent, kin, UNFINISHED, DELETED)
    unfinished = hidden(path, UNFINISHED)
    unfinished.mkdir()
    return unfinished


def sweep(parent: Path, kin: str, *words: str) -> None:
    """Delete the hidden folders that killed processes left in `parent`."""
    for word in words:
        for leftover in parent.glob(f".{kin}.{word}-*"):
            delete(leftover)


def finish(unfinished: Path, path: Path) -> None:
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
        discard(unfinished)  # it holds the older one now
    sync_path(path.parent)


def discard(unfinished: Path) -> None:
    """Delete a folder that will not be finished; what cannot be, the next `start` deletes."""
    # `ignore_errors` instead of `suppress(OSError)`: an interrupt inside of rmtree may leave it as
    # an OSError, which must not be lost.
    shutil.rmtree(unfinished, ignore_errors=True)
    if os.path.lexists(unfinished) and not unfinished.is_dir():
        unfinished.unlink()


def remove(path: Path) -> None:
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
