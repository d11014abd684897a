"""Reading pickled state dicts from untrusted files, through a memory map.

Only tensors and plain containers are unpickled (`weights_only`). Files with anything else, which
could run code, are refused.
"""

import json
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenformer.convert.source import INDEX, WEIGHTS
from tokenformer.errors import ConversionError


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, or of all files of a folder. Data is read from disk on use."""
    tensors: dict[str, Tensor] = {}
    for file in pickle_files(path):
        tensors |= read_file(file)
    return tensors


def pickle_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    if (path / WEIGHTS).exists():
        return [path / WEIGHTS]
    index = path / INDEX
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        raise ConversionError(f"{index} is not the index of a sharded model") from None
    for name in names:
        if Path(name).name != name:  # the index is untrusted
            raise ConversionError(f"{index} names a file outside the folder: {name}")
        if not (path / name).exists():
            raise ConversionError(f"{index} names {name}, which is missing")
    return [path / name for name in names]


def read_file(path: Path) -> dict[str, Tensor]:
    try:
        path.open("rb").close()
    except OSError as error:
        raise ConversionError(f"{path} cannot be read: {error.strerror}") from None
    try:
        # Files older than torch 1.6 are not zip archives and cannot be memory-mapped.
        mapped = zipfile.is_zipfile(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise ConversionError(f"{path} is refused: {refusal_reason(error)}") from None
    except Exception:  # torch raises all kinds of errors on broken files
        raise ConversionError(
            f"{path} is truncated or not a checkpoint: torch.load cannot read it"
        ) from None
    check_flat(path, found)
    return dict(found)


def refusal_reason(error: pickle.UnpicklingError) -> str:
    """Return one line for torch's error, which is long and suggests running the file's code."""
    text = str(error)
    asked = text.partition("Unsupported global: GLOBAL ")[2] or text.partition("GLOBAL ")[2]
    if named := asked.split():
        return (
            f"it contains {named[0]}, which could run code; only files that hold "
            "tensors alone are read"
        )
    return "it contains more than tensors and could run code; only tensors are read"


def check_flat(path: Path, found: Any) -> None:
    if not isinstance(found, dict) or not found:
        kind = "nothing" if isinstance(found, dict) else f"a {type(found).__name__}"
        raise ConversionError(f"{path} holds {kind}, not a state dict of tensors by name")
    strange = [
        key
        for key, value in found.items()
        if not isinstance(key, str) or not isinstance(value, Tensor)
    ]
    if strange:
        shown = ", ".join(f"{key} ({type(found[key]).__name__})" for key in strange[:5])
        raise ConversionError(
            f"{path} holds more than a state dict of tensors by name: {shown}"
            + (", ..." if len(strange) > 5 else "")
        )
