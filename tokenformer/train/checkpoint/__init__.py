"""Checkpoints of a run: written atomically, verified before they are loaded.

    path = save(run / "checkpoints", model=model, optimizer=optimizer, state={"step": 500})
    path = latest(run / "checkpoints")                  # the newest valid one, or None
    state, extra = load(path, model=model, optimizer=optimizer)

A checkpoint is a folder `step-00000500/`:

    shard-*.safetensors   model, optimizer, random number generators, the caller's extra tensors
    state.json            the caller's state, the optimizer's hyperparameters
    manifest.json         size and SHA-256 of each file

Tensors are written by torch.distributed.checkpoint: each rank saves its shards, and any number of
ranks can load them. Nothing in a checkpoint is a pickle. In a distributed run every function here
is collective: all ranks call it, and an error on one is raised on all.
"""

from tokenformer.train.checkpoint.directory import latest, prune, sweep
from tokenformer.train.checkpoint.reader import has_extra, load
from tokenformer.train.checkpoint.state import read_document, read_state
from tokenformer.train.checkpoint.writer import save

__all__ = [
    "has_extra",
    "latest",
    "load",
    "prune",
    "read_document",
    "read_state",
    "save",
    "sweep",
]
