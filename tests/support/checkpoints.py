"""Small checkpoints, their contents, and damage to them."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tests.support.checkpoint_worker import make_model, make_optimizer, step_once
from tokenformer.train.checkpoint import manifest, save


def trained(steps: int = 2, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = make_model()
    optimizer = make_optimizer(model, **options)
    for step in range(1, steps + 1):
        step_once(model, optimizer, step)
    return model, optimizer


def stored(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint of one rank, by plain safetensors."""
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    return found


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        assert torch.equal(one[name], other[name]), name


def assert_json_same(one: dict[str, str], other: dict[str, str]) -> None:
    sharding = "DCP_SHARDING_INFO"
    assert {**one, sharding: json.loads(one[sharding])} == {
        **other,
        sharding: json.loads(other[sharding]),
    }


def two_checkpoints(folder: Path) -> tuple[Path, Path]:
    model, optimizer = trained()
    paths = [
        save(folder, model=model, optimizer=optimizer, state={"step": step}) for step in (2, 10)
    ]
    return paths[0], paths[1]


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def forge(content: bytes) -> Callable[[Path], None]:
    """Write something else to a file, and its size and hash to the manifest."""

    def write(file: Path) -> None:
        file.write_bytes(content)
        listed = manifest.read(file.parent)
        listed[file.name] = {"size": len(content), "sha256": manifest.sha256(file)}
        manifest.write(file.parent, listed)

    return write


def add_a_shard(file: Path) -> None:
    shutil.copy(file, file.with_name("shard-00009-model-00001-of-00001.safetensors"))


def big(megabytes: int) -> dict[str, torch.Tensor]:
    return {"big": torch.ones(megabytes << 18)}
