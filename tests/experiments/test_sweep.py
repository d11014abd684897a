"""A sweep goes on while its best rate is the lowest or highest one."""

from pathlib import Path

import pytest

from experiments.exhibit import SCALES
from experiments.job import Results
from experiments.language import LanguageRun
from experiments.sweep import MOST_ADDED, Arm, tune
from tests.support.plans import missing_in_rounds

RATES = (2e-3, 4e-3, 8e-3)


def sweep_to_the_end(folder: Path, best: float) -> tuple[list[float], list[tuple[float, int]]]:
    """Finish all jobs of an arm, the loss lowest at `best`; return its rates and its runs."""
    results = Results(folder / "results.jsonl")

    def arm(results: Results) -> Arm:
        return tune(lambda rate: LanguageRun(rate=rate), RATES, SCALES["laptop"], results)

    for missing in missing_in_rounds(lambda results: arm(results).jobs, results):
        for job in missing:
            results.add(job, {"loss": abs(job.rate - best)})
    found = arm(results)
    return [run.rate for run in found.sweep], [(run.rate, run.seed) for run in found.runs]


@pytest.mark.parametrize(
    ("best", "rates"),
    [
        (4e-3, RATES),
        (16e-3, (*RATES, 16e-3, 32e-3)),
        (1e-3, (5e-4, 1e-3, *RATES)),
    ],
)
def test_the_best_rate_is_inside(best, rates, tmp_path):
    found, runs = sweep_to_the_end(tmp_path, best)
    assert tuple(found) == rates
    assert runs == [(best, seed) for seed in (0, 1, 2)]


def test_it_ends(tmp_path):
    found, _ = sweep_to_the_end(tmp_path, 1.0)
    assert len(found) == len(RATES) + MOST_ADDED


def test_smoke_tries_one_rate(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    arm = tune(lambda rate: LanguageRun(rate=rate), RATES, SCALES["smoke"], results)
    assert [run.rate for run in arm.sweep] == [2e-3]
    assert arm.runs == []
