"""Checkpoints of a run on disk: complete or absent, checked before they are believed.

    path = save(run / "checkpoints", model=model, optimizer=optimizer, state={"step": 500})
    path = latest(run / "checkpoints")                  # the newest valid one; None: there is none
    state, extra = load(path, model=model, optimizer=optimizer)

A checkpoint is a folder `step-00000500/`:

    shard-*.safetensors   model, optimizer, random number generators, the caller's extra tensors
    state.json            the caller's state, the optimizer's hyperparameters
    manifest.json         size and SHA-256 of each file

The tensors go through torch.distributed.checkpoint: each rank stores its part, and any number of
ranks can load them. Nothing in a checkpoint is a pickle. In a distributed run every function here
is collective: all ranks call it, and an error on one is raised on all.
"""

import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tokenformer.train import folder as folders
from tokenformer.train import manifest, rng
from tokenformer.train.optimizer_state import (
    fill_optimizer,
    match_groups,
    optimizer_targets,
    optimizer_tensors,
    read_groups,
)
from tokenformer.train.ranks import CheckpointError, Ranks
from tokenformer.train.storage import (
    Metadata,
    file_name,
    read_metadata,
    read_tensors,
    write_tensors,
)
from tokenformer.train.tensors import model_tensors, not_finite, storable

__all__ = [
    "CheckpointError",
    "Contents",
    "collect",
    "has_extra",
    "latest",
    "load",
    "prune",
    "read_document",
    "read_state",
    "save",
    "sweep",
    "write",
]

NAME = re.compile(r"step-(\d{8,})")
STATE = "state.json"

# One process is no mistake here.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or un")


@dataclass(frozen=True)
class Contents:
    """What one checkpoint is to hold."""

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
    """Write `folder`/step-XXXXXXXX, whole or not at all, and return it.

    `state` is anything JSON can hold and has a `step`; `extra` are further tensors by name, such as
    moving averages. A checkpoint of the same step is replaced. What killed saves left is deleted.
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
    """All of a checkpoint in memory; with `copy` apart from the run's own memory."""
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
    # Every rank has its own generators; stacked they are one tensor that all ranks hold alike.
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
                started = folders.start(path, kin="step-*")
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
                folders.finish(unfinished, path)
    except BaseException:
        if started is not None:
            folders.discard(started)
        raise
    return path


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

    Returns the caller's state and the extra tensors: those of `extra` filled in place (sharded ones
    stay sharded), the others new and whole on the CPU. Nothing is touched before every file was
    verified and every name, shape and type found to fit. `hashes=False` checks only sizes, for a
    path that `latest` has just verified. `hyperparameters=False` leaves those of the optimizer as
    they are. A rank beyond those that saved keeps its generators.
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


def read_state(path: Path, needs: Mapping[str, type] | None = None) -> dict[str, Any]:
    """The caller's state in a checkpoint that `latest` has verified. `needs`: the keys that the
    caller cannot do without, with their types."""
    with Ranks().together(f"checkpoint {path} cannot be read"):
        state: dict[str, Any] = parse_document(path)["state"]
        for name, kind in (needs or {}).items():
            if name not in state:
                raise CheckpointError(f"the state in {STATE} has no {name!r}")
            if not isinstance(state[name], kind):
                raise CheckpointError(
                    f"{name!r} in {STATE} is {state[name]!r:.40}, not of type {kind.__name__}"
                )
    return state


def has_extra(path: Path) -> bool:
    """Whether a checkpoint holds extra tensors."""
    with Ranks().together(f"checkpoint {path} cannot be read"):
        return bool(only(read_metadata(path), "extra"))


def read_document(path: Path) -> dict[str, Any]:
    """All that a checkpoint holds besides tensors."""
    with Ranks().together(f"checkpoint {path} cannot be read"):
        return parse_document(path)


def parse_document(path: Path) -> dict[str, Any]:
    """The contents of state.json, if they are of the form that `collect` gives them."""
    try:
        document = json.loads((path / STATE).read_bytes())
        step, groups = document["state"]["step"], document["optimizer"]
        fits = is_step(step) and (groups is None or all(map(is_group, groups)))
    except FileNotFoundError:
        raise CheckpointError(f"{STATE} is missing") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        fits = False
    if not fits:
        raise CheckpointError(f"{STATE} is not the state of a checkpoint")
    return cast(dict[str, Any], document)


def is_step(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_group(group: Any) -> bool:
    """Whether this can be a group of an optimizer, as `read_groups` writes it."""
    kinds = {"parameters": list, "options": dict, "state": dict}
    return all(isinstance(group[name], kind) for name, kind in kinds.items())


def only(tensors: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {name: value for name, value in tensors.items() if name.startswith(f"{kind}.")}


def compare(targets: Mapping[str, Tensor], saved: Metadata) -> None:
    """Refuse tensors that would stay unfilled, and what torch would convert or cut in silence."""
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


def steps(folder: Path) -> dict[int, Path]:
    """Checkpoints by step, oldest first, whole or not."""
    if not Path(folder).is_dir():
        return {}
    found = {path: NAME.fullmatch(path.name) for path in Path(folder).iterdir()}
    return dict(sorted((int(match[1]), path) for path, match in found.items() if match))


def latest(
    folder: Path, *, report: Callable[[str], None] = warnings.warn, hashes: bool = True
) -> Path | None:
    """The newest valid checkpoint, or None where there are no checkpoints. For each newer one that
    is damaged, rank 0 reports why it is skipped. If all are damaged, this raises a CheckpointError:
    a run that began again at step 0 would overwrite what is left of the old one."""
    ranks = Ranks()
    damaged: list[str] = []
    for path in ranks.share([*reversed(steps(folder).values())]):
        try:
            manifest.verify(path, hashes=hashes)
            read_document(path)
        except CheckpointError as error:
            damaged.append(str(error))
            if ranks.first:
                report(f"{error}; skipping it")
        else:
            return path
    if damaged:
        raise CheckpointError(
            f"no valid checkpoint in {folder}, {len(damaged)} damaged (the newest: {damaged[0]}); "
            "restore one from a backup; to start over, remove the run folder or choose another "
            "--out"
        )
    return None


def sweep(folder: Path) -> None:
    """Delete what a killed `prune` has left. Safe while a checkpoint is being written."""
    ranks = Ranks()
    with ranks.together(f"{folder} cannot be cleaned up"):
        if ranks.first:
            folders.sweep(Path(folder), "step-*", folders.DELETED)


def prune(
    folder: Path, *, keep_last: int, best: int | None = None, newest: int | None = None
) -> list[Path]:
    """Delete all but the last `keep_last` checkpoints and that of the step `best`.

    Damaged ones (by their sizes and state) do not count, and are left for their owner to look into;
    so are those of a step after `newest`, if given.
    """
    if keep_last < 1:
        raise CheckpointError(f"keep_last={keep_last} must be at least 1")
    ranks = Ranks()
    removed: list[Path] = []
    with ranks.together(f"checkpoints in {folder} cannot be pruned"):
        if ranks.first:
            whole = {
                step: path
                for step, path in steps(folder).items()
                if (newest is None or step <= newest) and is_whole(path)
            }
            for step in [*whole][:-keep_last]:
                if step != best:
                    folders.remove(whole[step])
                    removed.append(whole[step])
    return ranks.share(removed)


def is_whole(path: Path) -> bool:
    try:
        manifest.check_sizes(path)
        parse_document(path)
    except (CheckpointError, OSError):
        return False
    return True
