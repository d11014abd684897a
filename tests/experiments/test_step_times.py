"""The cost of arms: FLOPs of all their runs, seconds by the time of a step of every model."""

import pytest

from experiments.catalog import BEYOND, PAPER, load_exhibit
from experiments.exhibit import SCALES, complete
from experiments.job import Results
from experiments.language import Growth, LanguageRun, Model
from experiments.report import PUBLISHED
from experiments.step_times import StepTimes, cost_table, step_times
from experiments.vision import ImageModel, ImageRun

LAPTOP, SMOKE = SCALES["laptop"], SCALES["smoke"]
SMALL, LARGE = Model(tokens=8, width=32), Model(tokens=16, width=32)
SOURCE = LanguageRun(SMALL, (300,), batch=4, rate=1e-3)
GROWN = LanguageRun(steps=(100,), growth=(Growth(LARGE),), start=SOURCE, batch=4, rate=2e-3)
STAGED = LanguageRun(SMALL, (200, 50), growth=(Growth(LARGE),), batch=4, seed=1)
ARMS = {"from another run": [SOURCE, GROWN], "in stages": [STAGED]}


def test_a_step_of_every_model_is_timed_once():
    job = step_times(ARMS, LAPTOP)
    assert [run.model for run in job.runs] == [SMALL, LARGE]
    assert {(run.batch, run.length, run.seed) for run in job.runs} == {(4, 128, 0)}


def test_the_cost_of_an_arm_is_that_of_all_its_stages(tmp_path):
    job, results = step_times(ARMS, LAPTOP), Results(tmp_path / "results.jsonl")
    results.add(job, {"step_seconds": [0.1, 0.5]})
    _, *rows = cost_table(ARMS, job, results).rows
    assert rows == [
        ["from another run", "300 + 100", f"{SOURCE.flops + GROWN.flops:.2e}", "80"],
        ["in stages", "200 + 50", f"{STAGED.flops:.2e}", "45"],
    ]


def test_steps_are_timed_in_training_loops(workspace):
    workspace.prepare_data({"fashion-mnist"})  # digits stand in for it
    runs = (SOURCE.reduced(), ImageRun(ImageModel(), batch=4).reduced())
    result = StepTimes(runs, rounds=3).run(workspace)
    assert len(result["step_seconds"]) == 2
    assert all(seconds > 0 for seconds in result["step_seconds"])
    assert result["times_first"][0] == [1.0, 0.0]


@pytest.mark.parametrize("name", [*PAPER, *BEYOND])
def test_every_arm_of_the_published_exhibits_has_a_cost(name):
    exhibit, results = load_exhibit(name), Results(PUBLISHED)
    if exhibit.arms is None or not complete(exhibit, LAPTOP, results):
        pytest.skip(f"{name} has no published costs")
    arms = exhibit.arms(LAPTOP, results)
    _, *rows = cost_table(arms, step_times(arms, LAPTOP), results).rows
    assert len(rows) == len(arms) >= 2
    assert all(float(row[3]) > 0 for row in rows)
