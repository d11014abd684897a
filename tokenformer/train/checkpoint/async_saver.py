"""Checkpoints written while training goes on.

    with AsyncSaver() as saver:
        saver.save(folder, model=model, optimizer=optimizer, state={"step": step})
        ...                                          # train on; the snapshot stays as it is

`save` takes as long as a copy to CPU memory. One checkpoint is written at a time: the next `save`
waits for the one before, and raises its error if it failed.
"""

import warnings
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tokenformer.train.checkpoint.writer import collect, write
from tokenformer.train.parallel.ranks import Ranks


class AsyncSaver:
    """Collective, like all of checkpointing: every rank makes one, and calls it alike."""

    def __init__(self) -> None:
        # The writing ranks talk in a group of their own: in the training's, their messages would
        # come between its own. Always gloo, for what is written is in CPU memory.
        distributed = dist.is_available() and dist.is_initialized()
        self.ranks = Ranks(dist.new_group(backend="gloo") if distributed else None)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.unseen: list[Future[Path]] = []
        weakref.finalize(self, warn_of_failure, self.unseen)

    def save(
        self,
        folder: Path,
        *,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        state: Mapping[str, Any],
        extra: Mapping[str, Tensor] | None = None,
    ) -> None:
        """As `checkpoint.save`, but returns when a snapshot is taken."""
        self.wait()
        contents = collect(model=model, optimizer=optimizer, state=state, extra=extra, copy=True)
        self.unseen.append(self.thread.submit(write, folder, contents, self.ranks))

    def wait(self) -> Path | None:
        """Wait for the checkpoint under way and return it; None if there is none."""
        return self.unseen.pop().result() if self.unseen else None

    def __enter__(self) -> "AsyncSaver":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.wait()


def warn_of_failure(unseen: list[Future[Path]]) -> None:
    """The last resort for an error that no later call was there to raise."""
    for future in unseen:
        if error := future.exception():
            warnings.warn(str(error), stacklevel=1)
