"""Learning rate schedules: a linear warm-up, then cosine, constant or warm-up-stable-decay."""

import math
from collections.abc import Callable

from tokenformer.train.options import ScheduleOptions


def rate_factor(step: int, steps: int, options: ScheduleOptions) -> float:
    """Return the factor on the peak learning rate at `step` of `steps`, counted from 1."""
    if step <= options.warmup_steps:
        return step / options.warmup_steps
    done = (step - options.warmup_steps) / max(1, steps - options.warmup_steps)
    return SCHEDULES[options.kind](done, options)


def cosine(done: float, options: ScheduleOptions) -> float:
    return options.floor + (1 - options.floor) * (1 + math.cos(math.pi * done)) / 2


def constant(done: float, options: ScheduleOptions) -> float:
    return 1.0


def warmup_stable_decay(done: float, options: ScheduleOptions) -> float:
    left = (1 - done) / options.decay if options.decay else 1.0
    return options.floor + (1 - options.floor) * min(1.0, left)


SCHEDULES: dict[str, Callable[[float, ScheduleOptions], float]] = {
    "cosine": cosine,
    "constant": constant,
    "wsd": warmup_stable_decay,
}
