"""The number of CPU threads that trains a model fastest, by measurement.

Small models gain little from threads, and on a busy machine or with many cores they lose: threads
that wait for each other take as long as the work. `run.threads: auto` tries 1, 2, 4, ... threads.
"""

import os
import time
from typing import TYPE_CHECKING

import torch

from tokenformer.train import rng

if TYPE_CHECKING:
    from tokenformer.train.loop import Loop

TRIALS = 3
CLEARLY_FASTER = 0.95
"""More threads must take at most this share of the time of fewer."""


def fastest_thread_count(loop: "Loop") -> int:
    """Return the thread count whose forward and backward pass of the next batch is fastest. Model,
    data order and random numbers stay as they are."""
    before, random_state = torch.get_num_threads(), rng.states()
    counts = [1 << power for power in range(16) if 1 << power < cores()] + [cores()]
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    for trial in range(TRIALS + 1):
        for count in counts:
            torch.set_num_threads(count)
            start = time.perf_counter()
            loop.accumulate(loop.progress.samples)
            if trial:  # the first is a warm-up
                seconds[count].append(time.perf_counter() - start)
            loop.optimizer.zero_grad()
    torch.set_num_threads(before)
    rng.restore(random_state)
    return fastest({count: min(times) for count, times in seconds.items()})


def fastest(seconds: dict[int, float]) -> int:
    """Return the fastest count; of nearly equal ones the smallest."""
    best, *more = sorted(seconds)
    for count in more:
        if seconds[count] < CLEARLY_FASTER * seconds[best]:
            best = count
    return best


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
