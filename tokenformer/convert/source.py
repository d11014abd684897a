"""The source of a conversion: a file, folder or hub name, and the kind of model in it.

    find_source("Haiyang-W/TokenFormer-150M").kind       # "released"

Kinds are `released` (the authors' format), `checkpoint` (of one of our training runs), and
otherwise the `model_type` of a Hugging Face folder: `tokenformer`, `gpt2`, `llama`, ...
"""

import json
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from tokenformer.convert.hub import fetch_model
from tokenformer.errors import ConversionError
from tokenformer.train.checkpoint.manifest import MANIFEST

RELEASED, CHECKPOINT, TOKENFORMER = "released", "checkpoint", "tokenformer"
WEIGHTS, INDEX, CONFIG = "pytorch_model.bin", "pytorch_model.bin.index.json", "config.json"
DEEPSPEED = ("mp_rank_*_model_states.pt", "layer_*_states.pt", "zero_pp_rank_*.pt")
CONSOLIDATED = (WEIGHTS, INDEX, "model.safetensors", "model.safetensors.index.json")
FILE_ENDINGS = (".bin", ".pt", ".pth", ".safetensors")


@dataclass(frozen=True)
class Source:
    name: str
    """As the user gave it."""
    kind: str
    path: Path
    """The local file or folder."""

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent


def find_source(name: str) -> Source:
    path = Path(name)
    if not path.exists():
        if path.is_absolute() or name.startswith(".") or name.endswith(FILE_ENDINGS):
            raise ConversionError(f"{name} does not exist")
        path = fetch_model(name)
    refuse_deepspeed(path)
    if path.is_file():
        return Source(name, RELEASED, path)
    if (path / "model" / CONFIG).exists() and not (path / CONFIG).exists():  # a run
        path = path / "model"
    return Source(name, kind_of(path), path)


def kind_of(folder: Path) -> str:
    if (folder / MANIFEST).exists():
        return CHECKPOINT
    if model_type := read_config(folder).get("model_type"):
        return str(model_type)
    if (folder / WEIGHTS).exists() or (folder / INDEX).exists():
        return RELEASED
    raise ConversionError(
        f"no model in {folder}: neither a {WEIGHTS}, nor a {CONFIG} with a model_type, nor a "
        f"checkpoint of a run"
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of a folder, or {} if there is none."""
    path = folder / CONFIG
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConversionError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ConversionError(f"{path} is not a JSON object")
    return found


def refuse_deepspeed(path: Path) -> None:
    """Raise for a sharded DeepSpeed checkpoint, with the command that consolidates it."""
    if path.is_file():
        if not any(path.match(pattern) for pattern in DEEPSPEED):
            return
        path = path.parent
    parts = shard_files(path)
    latest = path / "latest"
    if not parts and latest.is_file():
        tag = latest.read_text(errors="replace").strip()
        parts = shard_files(path / tag) if Path(tag).name == tag else []
        whole, tagged = path, ""
    else:
        whole, tagged = path.resolve().parent, f" --tag {quote(path.resolve().name)}"
    if parts and not any((path / name).exists() for name in CONSOLIDATED):
        raise ConversionError(
            f"{path} is an unconsolidated DeepSpeed checkpoint ({parts[0].name}, ...); run "
            f"`python -m deepspeed.utils.zero_to_fp32 {quote(str(whole))} JOINED{tagged}` and "
            f"convert JOINED"
        )


def shard_files(folder: Path) -> list[Path]:
    return sorted(file for pattern in DEEPSPEED for file in folder.glob(pattern))
