"""Tokens or width: all shapes have equal parameters and tokens, and the advice follows the data."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from experiments.__main__ import main
from experiments.exhibit import SCALES
from experiments.job import Results
from experiments.language import LanguageRun
from experiments.tokens_or_width import (
    ARMS,
    EXHIBIT,
    HEAD,
    MODELS,
    arms,
    close_to_best,
    plan,
    report,
    table,
)
from tests.support.plans import missing_in_rounds

LAPTOP = SCALES["laptop"]


def made_up_results(path: Path, loss: Callable[[LanguageRun], float]) -> Results:
    """All runs of the plan with a loss of our choice, lowest at a rate of 8e-3."""
    results = Results(path / "results.jsonl")
    for missing in missing_in_rounds(partial(plan, LAPTOP), results):
        for job in missing:
            assert isinstance(job, LanguageRun)
            bits = loss(job) + 50 * abs(job.rate - 8e-3)
            results.add(job, {"bits_per_byte": bits, "loss": bits, "seconds": 60})
    return results


def test_all_models_have_equal_parameters_and_batches():
    counts = [model.parameters for model in ARMS.values()]
    assert max(counts) <= 1.01 * min(counts)
    assert counts == pytest.approx([300_000] * len(counts), rel=0.01)
    for model in ARMS.values():
        config = model.config()
        assert config.hidden_size == HEAD * config.num_attention_heads
    runs = [job for job in plan(LAPTOP, Results(Path("none"))) if isinstance(job, LanguageRun)]
    assert len({(run.steps, run.batch, run.length, run.seed) for run in runs}) == 1
    laws = {(run.model.family, run.rate_law) for run in runs}
    assert laws == {("tokenformer", "tokens"), ("transformer", "none")}


def test_shapes_within_the_seeds_of_the_best(tmp_path):
    offsets = {32: 0.3, 64: 0.012, 96: 0.0, 160: 0.1, 320: 0.2}

    def loss(run: LanguageRun) -> float:
        if run.model.family == "transformer":
            return 2.5
        return 2.7 + offsets[run.model.width] + 0.01 * (run.seed - 1)

    results = made_up_results(tmp_path, loss)
    found = arms(LAPTOP, results)
    assert close_to_best(found, results) == ["width 64", "width 96"], "a Transformer does not count"
    assert {arm.runs[0].rate for arm in found.values()} == {8e-3}
    findings = report(LAPTOP, results)
    assert "best at 2.700 bits per byte" in findings.argument
    assert "Shapes of 0.93 and 2.1 tokens per channel are" in findings.argument
    assert "costs 0.300 bits per byte" in findings.notes[0]
    assert findings.headline.startswith("best at 0.93 tokens per channel; width 32 +0.300")
    assert len(table(found, results).rows) == 1 + len(MODELS) + 1
    findings.plots[0].draw(tmp_path / "plot.png")


def test_a_best_shape_at_the_end_is_said_to_be_one(tmp_path):
    results = made_up_results(tmp_path, lambda run: 3 - run.model.width / 1000)
    assert "the best shape here is the widest" in report(LAPTOP, results).notes[0]


@pytest.mark.slow
def test_smoke(tmp_path):
    main(["run", "tokens_or_width", "--scale", "smoke", "--out", str(tmp_path)])
    assert f"## {EXHIBIT.title}" in (tmp_path / "report.md").read_text()
