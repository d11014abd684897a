"""The gradient of Pattention: closed forms against autograd, recording, and the verdict."""

from typing import Any

import pytest
import torch

from experiments.__main__ import main
from experiments.exhibit import SCALES
from experiments.gradients import SOFTMAX, THETAS, GradientRun, Recorded, plan, runs, verdict_of
from experiments.gradients.derivatives import DERIVATIVES, split_diagonal
from experiments.gradients.gradient_run import (
    KINDS,
    distribution,
    effective_tokens,
    kept_scores,
    measure,
)
from experiments.job import Results
from experiments.language import LanguageRun
from tests.support.training import make_loop
from tokenformer.ops.theta import THETAS as WEIGHTS

LAPTOP = SCALES["laptop"]


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("scale", [7, 20])
def test_closed_forms_agree_with_autograd(theta, scale):
    torch.manual_seed(0)
    scores = 3 * torch.randn(5, 7, dtype=torch.float64)
    found = DERIVATIVES[theta](scores, scale)
    for row, expected in zip(found, scores, strict=True):
        jacobian = torch.autograd.functional.jacobian(
            lambda a: WEIGHTS[theta](a, scale, "none", 0.0), expected
        )
        torch.testing.assert_close(row, jacobian)
    diagonal, others = split_diagonal(found)
    assert len(diagonal) == 5 * 7
    assert len(others) == 5 * 7 * 6
    assert diagonal[8] == found[1, 1, 1]
    assert others[0] == found[0, 0, 1]


def test_a_distribution():
    numbers = torch.cat([torch.full((50,), -1e-6), torch.linspace(0.01, 1, 51)])
    found = distribution(numbers)
    assert found["largest"] == 1
    assert found["vanished"] == pytest.approx(50 / 101, abs=1e-3)
    assert found["quantiles"][0] == 1e-6
    assert found["quantiles"][2] == pytest.approx(0.01)
    assert effective_tokens(torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 9.0, 0.0, 0.0]])) == 0.625


def test_measuring_changes_nothing():
    """Training goes on as if nothing was measured, and the scores have the loss's gradient."""
    loop, other = make_loop(), make_loop()
    assert loop.step()["loss"] == other.step()["loss"]
    recorded = measure(loop)
    assert len(recorded) == 5 * 2, "five projections, two layers"
    assert {layer["projection"] for layer in recorded} == {"q", "k", "v", "o", "ffn"}
    assert all(layer[kind]["largest"] > 0 for layer in recorded for kind in KINDS)
    assert all(parameter.grad is None for parameter in loop.task.model.parameters())
    assert loop.step()["loss"] == other.step()["loss"]


def test_the_plain_formula_is_the_model():
    loop = make_loop()
    batch = torch.zeros(1, 17, dtype=torch.long)
    with kept_scores(loop.task.model) as scores:
        loss = loop.task.module(batch)
        loss.backward()
    torch.testing.assert_close(loop.task.module(batch), loss)
    score = next(iter(scores.values()))
    assert score.grad is not None
    assert score.grad.abs().max() > 0


def layers_with(vanished: float) -> list[dict[str, Any]]:
    figures = {"quantiles": [0.1, 0.2, 0.3, 0.4, 0.5], "largest": 1.0, "vanished": vanished}
    return [
        {"layer": 0, "projection": name, "effective_tokens": 0.5} | dict.fromkeys(KINDS, figures)
        for name in "qk"
    ]


def results_with(shares: dict[str, list[tuple[float, float]]], tmp_path) -> Results:
    """Make results: the share of vanished derivatives at the start and the end, by seed."""
    results = Results(tmp_path / "results.jsonl")
    for theta, by_seed in shares.items():
        for job in runs(theta, LAPTOP, results)[0]:
            results.add(job, {"loss": abs(job.rate - 8e-3)})  # the best rate is the second
        for job, (first, last) in zip(runs(theta, LAPTOP, results)[1], by_seed, strict=True):
            assert job.training.rate == 8e-3
            recorded = [[0, layers_with(first)], [532, layers_with(last)]]
            results.add(job, {"bits_per_byte": 2.5, "recorded": recorded})
    return results


@pytest.mark.parametrize(
    ("last", "verdict"),
    [
        ((0.3, 0.4, 0.5), "holds"),
        ((0.3, 0.4, 0.021), "does not hold"),  # of one seed, not clearly more than GELU's
        ((0.0, 0.0, 0.0), "does not hold"),
    ],
)
def test_verdict(last, verdict, tmp_path):
    shares = {SOFTMAX: [(0.01, share) for share in last], "l2_gelu": [(0.0, 0.02)] * 3}
    results = results_with(shares, tmp_path)
    found = {theta: Recorded(theta, LAPTOP, results) for theta in THETAS}
    assert found[SOFTMAX].steps == [0, 532]
    assert found[SOFTMAX].vanished("diagonal", 532) == list(last)
    assert found[SOFTMAX].relative_median("diagonal", 0) == 0.3
    assert verdict_of(found) == verdict


def test_the_budget(tmp_path):
    """The sweep comes first; all runs of both thetas together stay in the budget."""
    results = Results(tmp_path / "results.jsonl")
    first = plan(LAPTOP, results)
    assert {type(job) for job in first} == {LanguageRun}
    assert len(first) == 6
    filled = results_with({theta: [(0.0, 0.1)] * 3 for theta in THETAS}, tmp_path)
    jobs = plan(LAPTOP, filled)
    assert sum(isinstance(job, GradientRun) for job in jobs) == 6
    assert sum(job.flops for job in jobs) < 2e13
    for job in jobs:
        if isinstance(job, GradientRun):
            assert job.record[-1] == job.training.steps[0], "the end is recorded"


@pytest.mark.slow
def test_smoke(tmp_path):
    main(["run", "gradients", "--scale", "smoke", "--out", str(tmp_path)])
    assert "## The gradient of Pattention" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "images" / "gradients.png").stat().st_size > 10_000
