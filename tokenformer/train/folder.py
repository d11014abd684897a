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
    for word in (UNFINISHED, DELETED):
        for leftover in path.parent.glob(f".{kin}.{word}-*"):
            shutil.rmtree(leftover)
    unfinished = hidden(path, UNFINISHED)
    unfinished.mkdir()
    return unfinished


def finish(unfinished: Path, path: Path) -> None:
    """Give a filled folder its name; an older folder of that name vanishes in the same instant."""
    for path_inside in unfinished.rglob("*"):
        sync_path(path_inside)
    sync_path(unfinished)
    try:
        unfinished.rename(path)  # also over an empty folder
    except OSError:
        if not path.is_dir():
            raise
        exchange(unfinished, path)
        sync_path(path.parent)
        discard(unfinished)  # it holds the older one now
    sync_path(path.parent)


def discard(unfinished: Path) -> None:
    """Delete a folder that will not be finished; what cannot be, the next `start` deletes."""
    shutil.rmtree(unfinished, ignore_errors=True)


def remove(path: Path) -> None:
    """Delete a folder that is never seen half deleted."""
    if path.exists():
        doomed = hidden(path, DELETED)
        path.rename(doomed)
        shutil.rmtree(doomed)


def hidden(path: Path, word: str) -> Path:
    return path.with_name(f".{path.name}.{word}-{secrets.token_hex(4)}")


def exchange(one: Path, other: Path) -> None:
    """Swap two folders: at once where the system can (Linux), else by way of a third name."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    at_working_folder, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    names = os.fsencode(one), os.fsencode(other)
    if renameat2 and not renameat2(at_working_folder, names[0], at_working_folder, names[1], swap):
        return
    between = hidden(other, DELETED)
    other.rename(between)
    one.rename(other)
    between.rename(one)
