"""Training in memory: steps with a problem are skipped, but not for ever."""

import pytest

from experiments.in_memory import summarize_rows, train_in_memory
from tests.support.training import make_loop
from tokenformer.errors import TrainingError
from tokenformer.train.run import MAX_PROBLEMS


def fail_steps(loop, count: int) -> None:
    """Let the next `count` steps have a problem."""
    healthy, left = loop.spikes.problem, [count]

    def problem(loss: float, norm: float) -> str | None:
        left[0] -= 1
        return "the loss is nan" if left[0] >= 0 else healthy(loss, norm)

    loop.spikes.problem = problem


def test_a_few_bad_steps_are_skipped():
    loop = make_loop()
    fail_steps(loop, MAX_PROBLEMS)
    rows = train_in_memory(loop)
    assert rows[-1]["step"] == loop.last_step
    assert summarize_rows(rows)["skipped"] == MAX_PROBLEMS


def test_a_run_that_has_diverged_ends():
    loop = make_loop()
    fail_steps(loop, 10**6)
    with pytest.raises(TrainingError, match="the loss is nan; 11 such steps"):
        train_in_memory(loop)
