"""Functions in several real processes that talk over gloo."""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

# They are forked from one process that has imported what takes long, and done nothing else.
START = "forkserver"
multiprocessing.get_context(START).set_forkserver_preload(["tokenformer.train.run"])


def run_processes(count: int, function: Callable[..., None], folder: Path, *args: Any) -> None:
    """`function(*args)` on every process of a group, as torchrun would describe it to them. What is
    raised on one is raised here."""
    meeting = str(folder / f"meeting-{function.__name__}")
    torch.multiprocessing.start_processes(
        _join, (count, meeting, function, args), nprocs=count, start_method=START
    )


def _join(
    rank: int, count: int, meeting: str, function: Callable[..., None], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=count)
    function(*args)
    dist.destroy_process_group()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
