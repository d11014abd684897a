"""manifest.json: sizes and SHA-256 hashes of a checkpoint's files; write and verify it."""

import _thread
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenformer.errors import CheckpointError
from tokenformer.files import fsync, sha256
from tokenformer.train.checkpoint.storage import SUFFIX
from tokenformer.train.parallel.ranks import Ranks

MANIFEST = "manifest.json"
Entries = dict[str, dict[str, Any]]
"""name -> {"size": bytes, "sha256": hexadecimal}"""


def entries(folder: Path, name: str) -> Entries:
    """Sync a file that this process wrote and return its size and hash; empty if it has none."""
    file = folder / name
    if not file.exists():
        return {}
    wait = sync_in_thread(file)  # while hashing
    digest = sha256(file)
    wait()
    return {name: {"size": file.stat().st_size, "sha256": digest}}


def sync_in_thread(file: Path) -> Callable[[], None]:
    """Start to sync a file in a thread; return a function that waits for it and raises its error.

    Uses `_thread` because Ctrl-C may arrive at any moment. Freeing a `threading.Thread` or an
    executor runs weakref callbacks, in which Python ignores exceptions, so a KeyboardInterrupt
    would be lost; keeping one means Python-level locks, which an interrupt can leave locked.
    """
    errors: list[OSError] = []
    done = _thread.allocate_lock()
    done.acquire()

    def sync() -> None:
        try:
            fsync(file)
        except OSError as error:
            errors.append(error)
        finally:
            done.release()

    def wait() -> None:
        done.acquire()
        if errors:
            raise errors[0]

    _thread.start_new_thread(sync, ())
    return wait


def write(folder: Path, files: Entries) -> None:
    document = {"format": 1, "files": dict(sorted(files.items()))}
    (folder / MANIFEST).write_text(json.dumps(document, indent=2) + "\n")


def verify(folder: Path, *, hashes: bool = True) -> None:
    """Raise a CheckpointError that names a missing, truncated, altered or unlisted file.

    Collective: each rank hashes some of the files.
    """
    ranks = Ranks()
    with ranks.together(f"checkpoint {folder}"):
        listed = check_sizes(folder)
        mine = sorted(listed)[ranks.index :: ranks.count] if hashes else []
        for name in mine:
            if sha256(folder / name) != listed[name]["sha256"]:
                raise CheckpointError(f"{name} was altered: its SHA-256 differs")


def check_sizes(folder: Path) -> Entries:
    """Return the manifest; raise if a file is missing, has another size or is not listed."""
    listed = read(folder)
    found = {file.name: file.stat().st_size for file in folder.iterdir()}
    for name, entry in sorted(listed.items()):
        if name not in found:
            raise CheckpointError(f"{name} is missing")
        if found[name] != entry["size"]:
            raise CheckpointError(f"{name} has {found[name]} of {entry['size']} bytes")
    for name in sorted(found.keys() - listed.keys()):
        # torch reads every tensor file in the folder; other files do no harm.
        if name.endswith(SUFFIX):
            raise CheckpointError(f"{name} is not listed in {MANIFEST}")
    return listed


def read(folder: Path) -> Entries:
    try:
        document = json.loads((folder / MANIFEST).read_text())
        version, listed = document["format"], document["files"]
        complete = all({"size", "sha256"} <= entry.keys() for entry in listed.values())
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{MANIFEST} is torn or altered") from None
    if version != 1 or not complete:
        raise CheckpointError(f"{MANIFEST} is of format {version}; this version reads format 1")
    return listed
