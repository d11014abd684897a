"""The list of a checkpoint's files with their sizes and SHA-256, and the check of both."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tokenformer.data.shards import sync_path
from tokenformer.train.ranks import CheckpointError, Ranks
from tokenformer.train.storage import SUFFIX

MANIFEST = "manifest.json"
Entries = dict[str, dict[str, Any]]
"""name -> {"size": bytes, "sha256": hexadecimal}"""


def entries(folder: Path, name: str) -> Entries:
    """Size and hash of a file that this process wrote, once it is on the disk; of none, nothing."""
    file = folder / name
    if not file.exists():
        return {}
    with ThreadPoolExecutor(1) as aside:  # the disk and the processor at once
        syncing = aside.submit(sync_path, file)
        digest = sha256(file)
        syncing.result()
    return {name: {"size": file.stat().st_size, "sha256": digest}}


def write(folder: Path, files: Entries) -> None:
    document = {"format": 1, "files": dict(sorted(files.items()))}
    (folder / MANIFEST).write_text(json.dumps(document, indent=2) + "\n")


def verify(folder: Path, *, hashes: bool = True) -> None:
    """Raise a CheckpointError that names a file that is missing, torn, altered or foreign.

    Collective: the ranks share the work of hashing.
    """
    ranks = Ranks()
    with ranks.together(f"checkpoint {folder}"):
        listed = check_sizes(folder)
        mine = sorted(listed)[ranks.index :: ranks.count] if hashes else []
        for name in mine:
            if sha256(folder / name) != listed[name]["sha256"]:
                raise CheckpointError(f"{name} was altered, its SHA-256 differs")


def check_sizes(folder: Path) -> Entries:
    """The manifest, if each file is there in its full size and no tensors are that it lacks."""
    listed = read(folder)
    found = {file.name: file.stat().st_size for file in folder.iterdir()}
    for name, entry in sorted(listed.items()):
        if name not in found:
            raise CheckpointError(f"{name} is missing")
        if found[name] != entry["size"]:
            raise CheckpointError(f"{name} has {found[name]} of {entry['size']} bytes")
    for name in sorted(found.keys() - listed.keys()):
        # Every tensor file in the folder would be read as part of it; a user's note harms nobody.
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
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{MANIFEST} is torn or altered") from None
    if version != 1 or not complete:
        raise CheckpointError(f"{MANIFEST} is of format {version}; this version reads format 1")
    return listed


def sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
