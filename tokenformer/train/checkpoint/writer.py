"""Save a checkpoint: collect tensors and state, write them to a temporary folder, rename it."""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tokenformer import files
from tokenformer.errors import CheckpointError
from tokenformer.train import rng
from tokenformer.train.checkpoint import manifest
from tokenformer.train.checkpoint.optimizer_state import optimizer_tensors, read_groups
from tokenformer.train.checkpoint.state import STATE, is_step
from tokenformer.train.checkpoint.storage import file_name, write_tensors
from tokenformer.train.checkpoint.tensors import model_tensors, not_finite, storable
from tokenformer.train.parallel.ranks import Ranks

# torch warns when a single process uses torch.distributed.checkpoint.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or un")


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint in memory."""

    step: int
    tensors: dict[str, Tensor]
    document: str
    """The text of state.json."""


def save(
    folder: Path,
    *,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    state: Mapping[str, Any],
    extra: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write `folder`/step-XXXXXXXX atomically and return its path.

    `state` holds JSON values and a `step`; `extra` further tensors by name, such as moving
    averages. Replaces a checkpoint of the same step and deletes the leftovers of killed saves.
    """
    contents = collect(model=model, optimizer=optimizer, state=state, extra=extra)
    return write(folder, contents, Ranks())


def collect(
    *,
    model: nn.Module,
    optimizer: Optimizer | None,
    state: Mapping[str, Any],
    extra: Mapping[str, Tensor] | None,
    copy: bool = False,
) -> Contents:
    """Return the contents of a checkpoint; `copy` takes a snapshot in CPU memory."""
    ranks = Ranks()
    step = state.get("step")
    if not is_step(step):
        raise CheckpointError(f"state['step'] is {step!r}; a checkpoint needs a step from 0 up")
    tensors = model_tensors(model)
    groups = None
    if optimizer is not None:
        tensors |= optimizer_tensors(model, optimizer)
        groups = read_groups(model, optimizer)
    tensors |= {f"extra.{name}": tensor for name, tensor in (extra or {}).items()}
    with ranks.together(f"step {step} is not saved"):
        if name := not_finite(tensors):
            raise CheckpointError(f"{name} holds a NaN or an infinity")
    # Each rank has its own generators; stacked, their states are one replicated tensor.
    everyone = ranks.gather(rng.states())
    tensors |= {
        f"rng.{name}": torch.stack([states[name] for states in everyone])  # [ranks, words]
        for name in everyone[0]
    }
    document = {
        "format": 1,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "ranks": ranks.count,
        "state": dict(state),
        "optimizer": groups,
    }
    try:
        text = json.dumps(document, indent=2, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"step {step} is not saved: its state is not JSON: {error}") from None
    return Contents(step, storable(tensors, copy=copy), text + "\n")


def write(folder: Path, contents: Contents, ranks: Ranks) -> Path:
    path = Path(folder) / f"step-{contents.step:08d}"
    task = f"checkpoint {path} cannot be written"
    started: Path | None = None
    try:
        with ranks.together(task):
            if ranks.first:
                started = files.start_folder(path, siblings="step-*")
        unfinished = ranks.share(started)
        assert unfinished is not None  # rank 0 started it
        with ranks.together(task):
            write_tensors(unfinished, contents.tensors, ranks)
            entries = manifest.entries(unfinished, file_name(ranks.index))
        everyones = ranks.gather(entries)
        with ranks.together(task):
            if ranks.first:
                (unfinished / STATE).write_text(contents.document)
                listed = manifest.entries(unfinished, STATE)
                for entries in everyones:
                    listed |= entries
                manifest.write(unfinished, listed)
                files.finish_folder(unfinished, path)
    except BaseException:
        if started is not None:
            files.discard_folder(started)
        raise
    return path
