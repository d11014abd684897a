"""Write checkpoints in the background.

    with AsyncSaver() as saver:
        saver.save(folder, model=model, optimizer=optimizer, state={"step": step})
        ...                                          # continue training; the snapshot is a copy

`save` takes as long as a copy to CPU memory. One checkpoint is written at a time: `save` waits
for the previous one and raises its error if it failed.
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
    """Collective: every rank creates one and makes the same calls."""

    def __init__(self) -> None:
        # A group of its own, so that messages do not mix with those of training. Always gloo: the
        # snapshot is in CPU memory.
        distributed = dist.is_available() and dist.is_initialized()
        self.ranks = Ranks(dist.new_group(backend="gloo") if distributed else None)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.pending: list[Future[Path]] = []
        weakref.finalize(self, warn_of_failure, self.pending)

    def save(
        self,
        folder: Path,
        *,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        state: Mapping[str, Any],
        extra: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Like `checkpoint.save`, but return once a snapshot is taken."""
        self.wait()
        contents = collect(model=model, optimizer=optimizer, state=state, extra=extra, copy=True)
        self.pending.append(self.thread.submit(write, folder, contents, self.ranks))

    def wait(self) -> Path | None:
        """Wait for the pending checkpoint and return its path; None without one."""
        return self.pending.pop().result() if self.pending else None

    def __enter__(self) -> "AsyncSaver":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.wait()


def warn_of_failure(pending: list[Future[Path]]) -> None:
    """Warn of an error that no later call raised."""
    for future in pending:
        if error := future.exception():
            warnings.warn(str(error), stacklevel=1)
