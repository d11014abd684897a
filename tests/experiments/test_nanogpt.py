"""The comparison with nanoGPT: its model and options are nanoGPT's, and times are counted right."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch

from experiments.__main__ import main
from experiments.exhibit import SCALES
from experiments.job import Results
from experiments.nanogpt import (
    ARMS,
    CONFIGURED,
    EXHIBIT,
    ITERATIONS,
    OUR_TRANSFORMER,
    SWEEP_ITERATIONS,
    TOKENFORMER,
    TRANSFORMER,
    TUNED,
    WHOLE,
    Found,
    interpolate,
    plan,
    report,
    run_at,
    step_at,
)
from experiments.nanogpt.loop_run import LoopRun, make_nanogpt
from experiments.step_times import StepTimes
from tests.support.plans import missing_in_rounds

LAPTOP, SMOKE = SCALES["laptop"], SCALES["smoke"]


def made_up_results(folder: Path) -> Results:
    """nanoGPT falls from 4 to 2 nats, faster at 2e-3; the TokenFormer to 1.5 in slower steps."""
    results = Results(folder / "results.jsonl")
    ends = {CONFIGURED: 2.0, OUR_TRANSFORMER: 1.8, WHOLE: 1.5}
    for missing in missing_in_rounds(partial(plan, LAPTOP), results):
        for job in missing:
            if isinstance(job, StepTimes):
                ratios = [[1.0, 0.0], [1.0, 0.1], [1.25, 0.1]]
                results.add(job, {"step_seconds": [0.1, 0.1, 0.12], "times_first": ratios})
                continue
            assert isinstance(job, LoopRun)
            family = WHOLE if job.base.model.tokens else OUR_TRANSFORMER
            best = 4e-3 if family == WHOLE else 2e-3
            end = ends[CONFIGURED if job.nanogpt else family] + abs(job.rate - best) * 100
            steps = job.base.steps[0]
            nats = [[0, 4.0], [steps // 2, (4 + end) / 2], [steps, end]]
            results.add(job, {"loss": end, "parameters": 1, "nats": nats})
    return results


def test_the_models_have_equal_weights_per_layer():
    embedding = 257 * 128 + 2 * 128  # and the final norm
    assert TOKENFORMER.parameters == TRANSFORMER.parameters == 4 * 12 * 128**2 + embedding
    config = TRANSFORMER.config()
    nanogpt = make_nanogpt(config, 64, seed=0)
    learned = 64 * 128 + 2 * 4 * 128 - 128  # positions, weights of the norms; no final bias
    assert sum(p.numel() for p in nanogpt.parameters()) == TRANSFORMER.parameters + learned


def test_initialization_is_nanogpts():
    model = make_nanogpt(TRANSFORMER.config(), 64, seed=1)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == 1).all()
            continue
        expected = 0.02 / math.sqrt(8) if ("out" in name or "down" in name) else 0.02
        assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
    assert model.head.weight is model.tokens.weight


def test_the_options_are_those_of_nanogpts_readme(workspace):
    run = run_at(CONFIGURED, 1e-3, ITERATIONS, LAPTOP)
    loop = run.loop(workspace)
    assert (run.base.batch, run.base.length, run.base.steps) == (12, 64, (2000,))
    rates = [loop.rate(step) for step in (1, 100, 2000)]
    assert rates == pytest.approx([1e-5, 1e-3, 1e-4])
    assert all(group["betas"] == (0.9, 0.99) for group in loop.optimizer.param_groups)
    assert {group["rate_factor"] for group in loop.optimizer.param_groups} == {1.0}
    for group in loop.optimizer.param_groups:
        is_matrix = group["params"][0].ndim >= 2
        assert group["weight_decay"] == (0.1 if is_matrix else 0)
    assert loop.clip_norm == 1


def test_all_models_see_the_same_batches_and_the_loss_is_a_sum(workspace):
    loops = [run_at(name, 1e-3, ITERATIONS, SMOKE).loop(workspace) for name in ARMS[1:]]
    batches = [loop.task.batch(4, 2) for loop in loops]
    assert all(torch.equal(batch, batches[0]) for batch in batches)
    nanogpt, batch = loops[0].module, batches[0]
    mean = loops[0].task.model(batch)
    assert nanogpt(batch).item() == pytest.approx(mean.item() * 2 * 32, rel=1e-5)
    assert loops[0].validate() == pytest.approx(math.log(257), rel=0.05), "near chance at first"


def test_the_sweep_is_short_and_its_best_rate_runs_in_full(tmp_path):
    results = made_up_results(tmp_path)
    jobs = [job for job in plan(LAPTOP, results) if isinstance(job, LoopRun)]
    full = [job for job in jobs if job.base.steps == (ITERATIONS,)]
    assert {job.base.steps[0] for job in jobs} == {ITERATIONS, SWEEP_ITERATIONS}
    assert sorted({(job.nanogpt, job.rate) for job in full}) == [
        (False, 2e-3),
        (False, 4e-3),
        (True, 1e-3),
        (True, 2e-3),
    ]
    assert len(full) == 4 * len(LAPTOP.seeds)


def test_losses_in_equal_time(tmp_path):
    found = Found.load(LAPTOP, made_up_results(tmp_path))
    assert found.loss(CONFIGURED) == pytest.approx(2.1)
    assert found.loss(TUNED) == pytest.approx(2.0)
    # 1,600 of 2,000 steps, from 2.75 at 1,000 to 1.5
    assert found.loss_in_time(WHOLE) == pytest.approx(2.75 - 1.25 * 0.6)
    assert found.loss_in_time(OUR_TRANSFORMER) == pytest.approx(1.8)
    # 2.1 is reached at 1,520 steps, which take the time of 1,900
    assert found.time_to_nanogpt(WHOLE) == pytest.approx(0.95)
    assert found.time_to_nanogpt(CONFIGURED) == pytest.approx(1.0)
    findings = report(LAPTOP, found.results)
    assert "95% of that time" in findings.argument
    findings.plots[0].draw(tmp_path / "plot.png")


def test_points_between_those_of_a_curve():
    curve = [[0, 4.0], [100, 3.0], [200, 2.0]]
    assert interpolate(curve, 150) == 2.5
    assert step_at(curve, 2.5) == 150
    assert step_at(curve, 1.9) is None
    with pytest.raises(ValueError, match="outside"):
        interpolate(curve, 201)


@pytest.mark.slow
def test_smoke(tmp_path):
    main(["run", "nanogpt", "--scale", "smoke", "--out", str(tmp_path)])
    assert f"## {EXHIBIT.title}" in (tmp_path / "report.md").read_text()
