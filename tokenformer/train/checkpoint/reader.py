"""Load a checkpoint into a model, an optimizer and the random number generators, in place."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tokenformer.errors import CheckpointError
from tokenformer.train import rng
from tokenformer.train.checkpoint import manifest
from tokenformer.train.checkpoint.optimizer_state import (
    fill_optimizer,
    match_groups,
    optimizer_targets,
)
from tokenformer.train.checkpoint.state import parse_document
from tokenformer.train.checkpoint.storage import Metadata, read_metadata, read_tensors
from tokenformer.train.checkpoint.tensors import model_tensors
from tokenformer.train.parallel.ranks import Ranks


def load(
    path: Path,
    *,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Tensor] | None = None,
    hashes: bool = True,
    hyperparameters: bool = True,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fill the model, the optimizer and the random number generators from a checkpoint, in place.

    Returns the caller's state and the extra tensors: those in `extra` filled in place (sharded ones
    stay sharded), the others new and whole on the CPU. Nothing changes before every file is
    verified and every name, shape and dtype is found to match. `hashes=False` checks only sizes,
    for a path that `latest` has just verified. `hyperparameters=False` keeps those of the
    optimizer. If more ranks load than saved, the additional ones keep their generators.
    """
    path, ranks = Path(path), Ranks()
    manifest.verify(path, hashes=hashes)
    with ranks.together(f"checkpoint {path} cannot be loaded"):
        document = parse_document(path)
        saved = read_metadata(path)
        targets = model_tensors(model)
        compare(targets, only(saved, "model"))
        groups = None
        if optimizer is not None:
            if document["optimizer"] is None:
                raise CheckpointError("it has no optimizer state")
            groups = match_groups(
                model, optimizer, document["optimizer"], hyperparameters=hyperparameters
            )
            targets |= optimizer_targets(model, optimizer, only(saved, "optimizer"))
        given = {f"extra.{name}": tensor.detach() for name, tensor in (extra or {}).items()}
        compare(given, {name: saved[name] for name in given if name in saved})
        fresh = only(saved, "rng") | only(saved, "extra")
        if "rng.cpu" not in fresh:
            raise CheckpointError("it lacks rng.cpu")
        targets |= {
            name: torch.empty(m.size, dtype=m.properties.dtype) for name, m in fresh.items()
        }
        targets |= given
    with ranks.together(f"checkpoint {path} cannot be loaded"):
        read_tensors(path, targets, ranks)
    if optimizer is not None and groups is not None:
        fill_optimizer(model, optimizer, only(targets, "optimizer"), groups)
    generators = only(targets, "rng")
    if ranks.index < len(generators["rng.cpu"]):
        rng.restore({name.removeprefix("rng."): t[ranks.index] for name, t in generators.items()})
    found = {name.removeprefix("extra."): tensor for name, tensor in only(targets, "extra").items()}
    return document["state"], found


def has_extra(path: Path) -> bool:
    """Whether a checkpoint holds extra tensors."""
    with Ranks().together(f"checkpoint {path} cannot be read"):
        return bool(only(read_metadata(path), "extra"))


def only(tensors: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {name: value for name, value in tensors.items() if name.startswith(f"{kind}.")}


def compare(targets: Mapping[str, Tensor], saved: Metadata) -> None:
    """Raise for tensors that would stay unfilled or that torch would convert or cut silently."""
    for name in [*targets, *saved]:
        if name not in saved:
            raise CheckpointError(f"it lacks {name}")
        if name not in targets:
            raise CheckpointError(f"its {name} has no place in the model")
        there, here = saved[name], targets[name]
        if there.size != here.shape:
            raise CheckpointError(f"{name} is {[*there.size]} there and {[*here.shape]} here")
        if there.properties.dtype != here.dtype:
            raise CheckpointError(f"{name} is {there.properties.dtype} there and {here.dtype} here")
