"""The conversion study, for a few steps: it runs and reuses the trained sources."""

from dataclasses import replace

import pytest

from experiments.__main__ import main
from experiments.conversion import MAPS, Conversion, SourceModel, conversion, map_error, rows_of
from experiments.exhibit import SCALES
from experiments.job import Results
from experiments.runner import run_jobs
from experiments.workspace import Workspace

SMOKE = SCALES["smoke"]


@pytest.mark.slow
def test_study_runs_and_reuses_its_sources(tmp_path):
    main(["run", "conversion", "--scale", "smoke", "--out", str(tmp_path)])
    assert "## Converting Transformers" in (tmp_path / "report.md").read_text()
    results, job = Results(tmp_path / "results.jsonl"), conversion("gpt2", SMOKE)
    rows = rows_of("gpt2", SMOKE, results)
    assert rows["source"]["divergence"] == 0
    for form in ("pair", "shift"):
        assert rows[form]["divergence"] < 0.1 * rows["random"]["divergence"]
        assert rows[f"{form}, continued"]["source_loss"] == rows["source"]["loss"]
    biases = 2 * job.source.width  # of the norms
    assert rows["pair"]["parameters"] == rows["random"]["parameters"] + biases
    workspace = Workspace(tmp_path, small=True)
    weights = workspace.model(job.source) / "model.safetensors"
    written, later = weights.stat().st_mtime_ns, replace(job, more=5)
    outcome = run_jobs(lambda results: [later], results, workspace, 1, print)
    assert outcome.finished == {later.key}, outcome.failed
    assert weights.stat().st_mtime_ns == written


def test_a_map_error_is_the_mean_over_layers():
    errors = {
        "model.layers.0.attention.q": 1.0,
        "model.layers.1.attention.q": 3.0,
        "model.layers.0.attention.v": 5.0,
        "model.layers.0.attention.o": 7.0,
        "model.layers.0.ffn": 9.0,
    }
    found = [map_error({"errors": errors}, maps) for maps in MAPS.values()]
    assert found == [3.0, 7.0, 9.0]


def test_a_later_part_has_the_same_source():
    source = SourceModel("llama")
    assert Conversion(source).needs == Conversion(source, more=5, rate=1e-3).needs == (source,)
    assert Conversion(source).key != Conversion(source, more=5).key
