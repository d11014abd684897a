"""Arms of a comparison: a sweep of learning rates at one seed, then all seeds at the best rate.

    arm = tune(lambda rate: LanguageRun(rate=rate), (4e-3, 8e-3, 1.6e-2), scale, results)
    arm.jobs        # what to compute, for a plan
    arm.runs        # one run per seed at the best rate; none until the sweep is finished

A sweep whose best rate is its lowest or highest one goes on in that direction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.exhibit import Scale
from experiments.job import Results, Summary, best_of, summarize

MOST_ADDED = 2
"""Rates that a sweep adds at most."""


@dataclass(frozen=True)
class Arm:
    sweep: list[Any]
    """Runs at every rate, lowest first."""
    runs: list[Any]

    @property
    def jobs(self) -> list[Any]:
        return [*self.sweep, *self.runs]

    def summary(self, results: Results, metric: str = "bits_per_byte") -> Summary:
        return summarize(self.runs, results, metric)


def tune(
    run_at: Callable[[float], Any],
    rates: Sequence[float],
    scale: Scale,
    results: Results,
    metric: str = "loss",
) -> Arm:
    """Return the arm whose runs have the lowest `metric` at the first seed."""
    runs = sweep(run_at, scale.sweep(rates), results, metric)
    best = best_of(runs, results, metric)
    return Arm(runs, [] if best is None else [best.with_seed(seed) for seed in scale.seeds])


def sweep(
    run_at: Callable[[float], Any], rates: Sequence[float], results: Results, metric: str = "loss"
) -> list[Any]:
    """Return the runs at `rates`, in steps of one factor, and at those that the results so far
    ask for."""
    rates = sorted(rates)
    runs = [run_at(rate) for rate in rates]
    if len(rates) == 1:
        return runs
    factor = rates[1] / rates[0]
    for _ in range(MOST_ADDED):
        best = best_of(runs, results, metric)
        if best is runs[0]:
            rates.insert(0, rates[0] / factor)
            runs.insert(0, run_at(rates[0]))
        elif best is runs[-1]:
            rates.append(rates[-1] * factor)
            runs.append(run_at(rates[-1]))
    return runs
