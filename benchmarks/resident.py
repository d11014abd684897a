"""The resident memory of a process, by Linux's own account.

A peak belongs to a process, so each is measured in a new one, the fork of a server that has
imported what benchmarks need and computed nothing. The high-water mark is set back when what is
measured begins: `ru_maxrss` cannot be, and begins at the size of the process that started this one.
"""

import ctypes
import gc
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

STATUS = Path("/proc/self/status")
RESET_PEAK = "5"
LOOK_EVERY = 0.01  # seconds
PRELOADED = [
    "benchmarks.training",
    "tokenformer.growth.model_folder",
    "transformers.models.gpt_neox",
]


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result, from a process of its own; it must belong to a module."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(quietly, function, arguments).result()


def quietly(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Without the bars of transformers."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    return function(*arguments)


class PeakMemory:
    """`with PeakMemory() as peak:` what the process holds at most beyond what it held before."""

    bytes: int
    """Gained, at the most."""
    own_bytes: int
    """The same without the pages of mapped files, which the system may take back. Linux keeps no
    mark of that; it is looked up a hundred times a second."""

    def __enter__(self) -> "PeakMemory":
        give_back()
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)
        self.before, self.own_before = status("VmRSS"), status("RssAnon")
        self.own_most, self.ended = self.own_before, threading.Event()
        self.watch = threading.Thread(target=self.look_up, daemon=True)
        self.watch.start()
        return self

    def look_up(self) -> None:
        while True:
            self.own_most = max(self.own_most, status("RssAnon"))
            if self.ended.wait(LOOK_EVERY):
                return

    def __exit__(self, *_: object) -> None:
        self.bytes = status("VmHWM") - self.before
        self.ended.set()
        self.watch.join()
        self.own_bytes = max(self.own_most, status("RssAnon")) - self.own_before


def give_back() -> None:
    """What the allocator holds for later would be used again unseen."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def status(field: str) -> int:
    """In bytes."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise KeyError(f"{STATUS} has no {field}")
