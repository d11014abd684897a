"""Checksums of a model folder's weights, and the check for damaged files, NaN and inf.

`save_pretrained` writes `checksums.json` next to the weights. The commands verify a local folder
before they load it. Files without a checksum are still searched for NaN and inf. A verified file is
not read again until its size or modification time changes.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from tokenformer.files import cache_folder, sha256
from tokenformer.models.weight_files import (
    DTYPES,
    INDEX,
    WEIGHTS,
    ModelFolderError,
    read_object,
    weight_files,
)

CHECKSUMS = "checksums.json"
VERIFIED = "verified.json"
MAX_REMEMBERED = 512
BLOCK = 1 << 22
HINT = f"restore it, or, if the change is yours, delete {CHECKSUMS} or pass --no_verify"
LOAD_ANYWAY = "use another model, or pass --no_verify to load it anyway"
Stamp = list[Any]
"""Size, modification time in nanoseconds, and expected SHA-256 of a file, or None."""


def write_checksums(folder: Path, hashes: Mapping[str, str] | None = None) -> None:
    """Write the size and SHA-256 of every weight file of a folder to checksums.json. Files in
    `hashes`, by name, are not read."""
    known = hashes or {}
    saved = any((folder / name).exists() for name in (WEIGHTS, INDEX))
    files = {
        file.name: {"size": file.stat().st_size, "sha256": known.get(file.name) or sha256(file)}
        for file in (weight_files(folder) if saved else [])
    }
    document = {"format": 1, "files": files}
    (folder / CHECKSUMS).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def read_checksums(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the entries of checksums.json by file name; empty without the file."""
    if not (folder / CHECKSUMS).exists():
        return {}
    document = read_object(folder, CHECKSUMS)
    files = document.get("files")
    complete = isinstance(files, dict) and all(
        isinstance(entry, dict) and {"size", "sha256"} <= entry.keys() for entry in files.values()
    )
    if document.get("format") != 1 or not complete:
        raise ModelFolderError(folder, f"{CHECKSUMS} is damaged; {HINT}")
    return files  # type: ignore[return-value]


def verify_weights(folder: Path, files: list[Path]) -> None:
    """Raise an error for files that differ from checksums.json and for NaN or infinite weights.

    If another tool saved the folder again, checksums.json may lack files or list deleted ones: only
    files that exist and are listed are compared.
    """
    listed, verified = read_checksums(folder), read_verified()
    found: dict[str, Stamp] = {}
    for file in files:
        entry = listed.get(file.name)
        path, status = str(file.resolve()), file.stat()
        if entry is not None and entry["size"] != status.st_size:
            reason = f"{file.name} has {status.st_size:,} bytes, not {entry['size']:,}"
            raise ModelFolderError(folder, f"{reason} as in {CHECKSUMS}; {HINT}")
        stamp = [status.st_size, status.st_mtime_ns, entry and entry["sha256"]]
        if verified.get(path) == stamp:
            continue
        digest, bad = scan(folder, file)
        if entry is not None and digest != entry["sha256"]:
            reason = f"{file.name} was changed or damaged, its SHA-256 differs from {CHECKSUMS}"
            raise ModelFolderError(folder, f"{reason}; {HINT}")
        if bad is not None:
            raise ModelFolderError(folder, f"{bad} has NaN or infinite weights; {LOAD_ANYWAY}")
        found[path] = stamp
    if found:
        remember(verified, found)


def scan(folder: Path, file: Path) -> tuple[str, str | None]:
    """Return the SHA-256 of a safetensors file and its first tensor that is not finite.

    The header was checked before: tensors are stored without gaps.
    """
    digest, bad = hashlib.sha256(), None
    buffer = bytearray(BLOCK)
    with file.open("rb") as stream:
        length = stream.read(8)
        header = stream.read(int.from_bytes(length, "little"))
        digest.update(length + header)
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            start, end = entry["data_offsets"]
            dtype = DTYPES.get(entry["dtype"])
            checked = dtype is not None and dtype.is_floating_point and dtype.itemsize > 1
            while start < end:
                view = memoryview(buffer)[: min(BLOCK, end - start)]
                if stream.readinto(view) != len(view):
                    raise ModelFolderError(folder, f"{file.name} is truncated")
                digest.update(view)
                if checked and bad is None and not is_finite(view, dtype):
                    bad = name
                start += len(view)
        digest.update(stream.read())
    return digest.hexdigest(), bad


def is_finite(view: memoryview, dtype: Any) -> bool:
    low, high = torch.frombuffer(view, dtype=dtype).aminmax()  # NaN propagates to both
    return bool(low.isfinite() & high.isfinite())


def read_verified() -> dict[str, Stamp]:
    """Return the stamps of verified files, by path."""
    with suppress(OSError, ValueError):
        found = json.loads((cache_folder() / VERIFIED).read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}


def remember(verified: dict[str, Stamp], found: dict[str, Stamp]) -> None:
    """Store the stamps of verified files; the newest are kept. If two processes store at once, one
    of them may have to read its files again."""
    others = {path: stamp for path, stamp in verified.items() if path not in found}
    kept = dict(islice({**found, **others}.items(), MAX_REMEMBERED))
    with suppress(OSError):  # without a cache every load reads the files
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix=f".{VERIFIED}-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(kept, file)
            Path(name).replace(folder / VERIFIED)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
