"""The weight files of a model folder, and the names, dtypes and shapes in their headers.

Reading the headers takes milliseconds and no memory, so a folder is checked before a model is
built.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tokenformer.errors import TokenformerError, one_line

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes of the safetensors format that our models may contain."""


class ModelFolderError(TokenformerError):
    """A model folder that cannot be loaded, and why."""

    def __init__(self, folder: Path | str, reason: str) -> None:
        super().__init__(f"{folder} cannot be loaded: {reason}")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the header of its file describes it."""

    file: Path
    dtype: str
    """As safetensors writes it: F32, BF16, ..."""
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype | None:
        return DTYPES.get(self.dtype)


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON file of a model folder, which must be an object."""
    try:
        found = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFolderError(folder, f"it has no {name}") from None
    except OSError as error:
        raise ModelFolderError(folder, f"{name}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(folder, f"{name} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        kind = "null" if found is None else type(found).__name__
        raise ModelFolderError(folder, f"{name} must hold a JSON object, not {kind}")
    return found


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that transformers would load: one file, or the shards of an
    index."""
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if (folder / INDEX).exists():
        return indexed_files(folder)
    if pickled := next((name for name in PICKLED if (folder / name).exists()), None):
        reason = f"{pickled} is a pickle, which can run code when it is read"
        raise ModelFolderError(folder, f"{reason}; save the model as {WEIGHTS}")
    raise ModelFolderError(folder, f"it has no weights; {WEIGHTS} is missing")


def remove_stale_weights(folder: Path) -> None:
    """Remove the weights of an earlier save: a single file, or shards with an index.

    transformers would load an old single file in place of newer shards. It deletes old shards
    itself, so if the shards of the index are complete, they are the new weights.
    """
    if not ((folder / WEIGHTS).exists() and (folder / INDEX).exists()):
        return
    try:
        names = [file.name for file in indexed_files(folder)]
    except ModelFolderError:
        names = []
    stale = WEIGHTS if names and all(map(SHARD.fullmatch, names)) else INDEX
    (folder / stale).unlink()


def indexed_files(folder: Path) -> list[Path]:
    """Return the shards in a weight index. All must be inside the folder."""
    weight_map = read_object(folder, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFolderError(folder, f"{INDEX} has no weight_map")
    root = folder.resolve()
    if root.parent.name == "snapshots":  # the hub cache, whose files link to blobs/
        root = root.parent.parent
    files = []
    for name in sorted({str(name) for name in weight_map.values()}):
        file = folder / name
        if Path(name).name != name or not file.resolve().is_relative_to(root):
            raise ModelFolderError(folder, f"{INDEX} names a file outside the folder: {name}")
        if not file.is_file():
            raise ModelFolderError(folder, f"{INDEX} names {name}, which does not exist")
        files.append(file)
    return files


def read_headers(folder: Path, files: list[Path]) -> dict[str, StoredTensor]:
    """Return every tensor of these files, by name."""
    stored: dict[str, StoredTensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  # not iterable
                    part = tensors.get_slice(name)
                    stored[name] = StoredTensor(file, part.get_dtype(), tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            line = one_line(error)
            raise ModelFolderError(folder, f"{file.name} is damaged: {line}") from None
    return stored
