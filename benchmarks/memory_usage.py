"""Measure memory: the peak of a process, and what autograd saves for the backward pass.

Peaks come from /proc (Linux only). Each is measured in a new process, forked from a server that has
imported what the benchmarks need and computed nothing. `PeakMemory` resets the high-water mark;
`ru_maxrss` cannot be reset and starts at the size of the parent process.
"""

import ctypes
import gc
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

STATUS = Path("/proc/self/status")
RESET_PEAK = "5"
POLL_SECONDS = 0.01
PRELOADED = [
    "benchmarks.training",
    "tokenformer.growth.model_folder",
    "transformers.models.gpt_neox",
]


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a module-level function in a new process and return its result."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(run_quietly, function, arguments).result()


def run_quietly(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call the function without the progress bars of transformers."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    return function(*arguments)


class PeakMemory:
    """`with PeakMemory() as peak:` measures how far memory rises above its level at the start."""

    bytes: int
    """Peak resident memory above the start."""
    anonymous_bytes: int
    """The same without the pages of mapped files, which the system can reclaim. Linux has no
    high-water mark for it, so it is polled a hundred times a second."""

    def __enter__(self) -> "PeakMemory":
        release_free_memory()
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)
        self.start, self.anonymous_start = status("VmRSS"), status("RssAnon")
        self.anonymous_peak, self.ended = self.anonymous_start, threading.Event()
        self.poller = threading.Thread(target=self.poll, daemon=True)
        self.poller.start()
        return self

    def poll(self) -> None:
        while True:
            self.anonymous_peak = max(self.anonymous_peak, status("RssAnon"))
            if self.ended.wait(POLL_SECONDS):
                return

    def __exit__(self, *_: object) -> None:
        self.bytes = status("VmHWM") - self.start
        self.ended.set()
        self.poller.join()
        self.anonymous_bytes = max(self.anonymous_peak, status("RssAnon")) - self.anonymous_start


def release_free_memory() -> None:
    """Return free memory to the system; reusing it would not show up in the peak."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def status(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise KeyError(f"{STATUS} has no field {field}")


class SavedTensors:
    """`with SavedTensors(inputs) as saved:` counts what autograd saves, except for the inputs."""

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        self.excluded = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        self.storages: dict[int, int] = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.record, lambda tensor: tensor)

    def record(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.excluded:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    def __enter__(self) -> "SavedTensors":
        self.hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.hooks.__exit__(*error)

    @property
    def bytes(self) -> int:
        return sum(self.storages.values())
