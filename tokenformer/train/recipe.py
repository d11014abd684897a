"""The record of a recipe in its run's folder, which the run goes on by."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from tokenformer.data.shards import write_whole
from tokenformer.train.options import Recipe

CONFIG = "config.yaml"
FIXED = ("model", "data", "augmentation")
"""Sections that a run cannot change once it has begun."""


def check_record(recipe: Recipe, folder: Path) -> None:
    """Refuse a recipe in the folder of a run of another one."""
    path = folder / CONFIG
    if not path.exists():
        return
    before, given = yaml.safe_load(path.read_text()), plain(asdict(recipe))
    for section in FIXED:
        known = before.get(section, {})  # an older record may lack options of today
        for name, value in given[section].items():
            if name in known and known[name] != value:
                raise ValueError(
                    f"{folder} holds a run with {section}.{name} = {known[name]!r}, not "
                    f"{value!r}; name another --out"
                )


def record(recipe: Recipe, folder: Path) -> None:
    """Keep the recipe beside its run."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / CONFIG, yaml.safe_dump(plain(asdict(recipe)), sort_keys=False))


def plain(value: Any) -> Any:
    """Tuples as lists, which YAML can write without tags."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value
