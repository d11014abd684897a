"""Caches which names the models of transformers export.

To load names lazily, transformers needs to know which file has them: at every start it reads the
source of all its models, twice. The result is kept in the user's cache, for as long as no file
changes its size or modification time, which is also how Python decides whether to compile a file.
"""

import hashlib
import json
import os
from contextlib import suppress
from functools import cache, wraps
from pathlib import Path
from typing import Any

from tokenformer.files import cache_folder, write_atomic

Structure = dict[frozenset[str], dict[str, set[str]]]
"""The exported names by required packages and by module."""

CACHE = "transformers-models.json"


def cache_import_structure(import_utils: Any) -> None:
    """Wrap `define_import_structure` in the module of transformers that has it. It returns the
    names in a folder, or in the folder of a file, with a prefix before the modules."""
    models = Path(import_utils.__file__).parents[1] / "models"
    original = getattr(import_utils, "define_import_structure", None)
    if original is None:  # another version of transformers
        return

    @cache
    def models_structure() -> Structure:
        stamp = folder_stamp(models)
        structure = read_structure(stamp)
        if structure is None:
            structure = original(models)
            remember(stamp, structure)
        return structure

    @wraps(original)
    def define_import_structure(module_path: Any, prefix: str | None = None) -> Structure:
        if Path(module_path) not in (models, models / "__init__.py"):
            return original(module_path, prefix)
        start = "" if prefix is None else f"{prefix}."
        return {  # a copy: the caller adds to it
            packages: {start + module: set(names) for module, names in modules.items()}
            for packages, modules in models_structure().items()
        }

    import_utils.define_import_structure = define_import_structure


def folder_stamp(folder: Path) -> str:
    """Return a hash of the names, sizes and modification times of all Python files."""
    files, folders = [], [str(folder)]
    for path in folders:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name.endswith(".py"):
                    status = entry.stat()
                    files.append((entry.path, status.st_size, status.st_mtime_ns))
                elif entry.name != "__pycache__" and entry.is_dir():
                    folders.append(entry.path)
    return hashlib.sha256(repr(sorted(files)).encode()).hexdigest()


def read_structure(stamp: str) -> Structure | None:
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        found = json.loads((cache_folder() / CACHE).read_text(encoding="utf-8"))
        if found["stamp"] == stamp:
            return {
                frozenset(packages): {module: set(names) for module, names in modules.items()}
                for packages, modules in found["structure"]
            }
    return None


def remember(stamp: str, structure: Structure) -> None:
    rows = [
        [sorted(packages), {module: sorted(names) for module, names in modules.items()}]
        for packages, modules in structure.items()
    ]
    with suppress(OSError):  # without a cache every start reads the files
        folder = cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(folder / CACHE, json.dumps({"stamp": stamp, "structure": rows}))
