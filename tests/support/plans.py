"""Plans of experiments, finished with made-up results."""

from collections.abc import Callable, Iterator, Sequence

from experiments.job import Job, Results

ROUNDS = 20
"""A plan grows with its results, for a few rounds: sweeps, their extensions, the seeds."""


def missing_in_rounds(
    plan: Callable[[Results], Sequence[Job]], results: Results
) -> Iterator[list[Job]]:
    """Yield the missing jobs of a plan until there are none; the caller adds their results."""
    for _ in range(ROUNDS):
        missing = [job for job in plan(results) if job not in results]
        if not missing:
            return
        yield missing
    raise AssertionError(f"the plan is not finished after {ROUNDS} rounds")
