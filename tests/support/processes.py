"""Real processes for tests: commands, programs that are signalled, and functions on several ranks.

Every wait ends: LIMIT is a safety net for a hung program, far above what a busy machine needs.
"""

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

LIMIT = 600.0
"""Seconds."""

# They are forked from one process that has imported what takes long, and done nothing else.
START = "forkserver"
multiprocessing.get_context(START).set_forkserver_preload(["tokenformer.train.run"])


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """A command to its end, with what it wrote."""
    return subprocess.run(
        command, **{"capture_output": True, "text": True, "timeout": LIMIT, **options}
    )


@contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A program under way, killed at the end of the block if it still runs."""
    process = subprocess.Popen(command, preexec_fn=take_interrupts, **options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=LIMIT)


def take_interrupts() -> None:
    """SIGINT as a program of a terminal has it; under nohup, or in the background of a shell, the
    tests run with SIGINT ignored, which their children would inherit."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_until(
    condition: Callable[[], Any], process: subprocess.Popen[Any] | None = None, pause: float = 0.01
) -> bool:
    """Wait until a condition holds; False if it does not once the process has ended."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        if process is not None and process.poll() is not None:
            return bool(condition())
        assert time.monotonic() < deadline, f"nothing happened in {LIMIT:.0f} s"
        time.sleep(pause)
    return True


def run_apart(function: Callable[..., None], *args: Any) -> None:
    """`function(*args)` in a process of its own. If it fails there, its traceback is on stderr."""
    process = multiprocessing.get_context(START).Process(target=function, args=args)
    process.start()
    process.join(LIMIT)
    if process.exitcode is None:
        process.kill()
        process.join(LIMIT)
    assert process.exitcode == 0, f"{function.__name__} ended with {process.exitcode}"


def run_processes(count: int, function: Callable[..., None], folder: Path, *args: Any) -> None:
    """`function(*args)` on every process of a group, as torchrun would describe it to them. What is
    raised on one is raised here."""
    meeting = str(folder / f"meeting-{function.__name__}")
    context = torch.multiprocessing.start_processes(
        _join, (count, meeting, function, args), nprocs=count, start_method=START, join=False
    )
    assert context is not None
    deadline = time.monotonic() + LIMIT
    try:
        while not context.join(timeout=5):
            assert time.monotonic() < deadline, f"{function.__name__} did not end"
    finally:
        for process in context.processes:
            process.kill()


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
