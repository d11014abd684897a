"""The growth study: runs compare at equal compute, and its tables and plots come from the rows."""

from dataclasses import replace

import pytest

from experiments import growth
from experiments.exhibit import SCALES
from experiments.job import Results
from experiments.report import PUBLISHED, write_report

LAPTOP = SCALES["laptop"]


@pytest.mark.parametrize("title", growth.COMPARISONS)
def test_compared_runs_have_the_same_compute(title):
    flops = [run.flops for run in growth.COMPARISONS[title].values()]
    assert max(flops) == pytest.approx(min(flops), rel=0.01)


def test_the_decay_of_a_baseline_covers_as_many_steps_as_in_a_growing_run():
    (steps,) = (run := growth.decay_like_grown(growth.from_scratch(64, 2e12))).steps
    assert run.decay * (steps - growth.WARMUP) == pytest.approx(growth.DECAY * steps, rel=0.01)


def test_published_rows_of_the_study_are_runs_of_its_plan():
    results = Results(PUBLISHED)
    jobs = growth.plan(LAPTOP, results)
    found = [results[job] for job in jobs if job in results]
    assert len(found) > 100
    assert all(row["curve"][-1][-1] == row["bits_per_byte"] for row in found)


def test_tables_and_plots_are_made_of_the_rows(tmp_path):
    """With made-up losses, of which the tables show the mean."""
    results = Results(tmp_path / "results.jsonl")
    for job in growth.plan(LAPTOP, results):
        bits = 3.0 + job.seed / 10
        curve = [[0, 0, 8.0], [job.steps[-1], job.flops, bits]]
        results.rows[job.key] = {"bits_per_byte": bits, "curve": curve}
    page = write_report({"growth": growth.EXHIBIT}, LAPTOP, results, tmp_path).read_text()
    assert page.count("| grown, shrink | 3.100 | 3.000-3.200 |") == len(growth.COMPARISONS)
    assert "ends below both sizes from scratch in 0 of 3 comparisons" in page
    for name in ("rate-law.png", "growth-study.png", "growth-curves.png"):
        assert (tmp_path / "images" / name).read_bytes().startswith(b"\x89PNG")


def test_the_control_is_another_job_than_the_run_it_controls():
    control = growth.FACTORS[
        "control: all tokens start again at growth, only the embedding is kept"
    ]
    same = replace(growth.GROWN, growth=control.growth)
    assert control.key != same.key
    assert control.steps == growth.GROWN.steps
