"""The conversion study, for a few steps: it runs and reuses the trained sources."""

import json
import sys

import pytest

from tests.support.scripts import EXPERIMENTS, load_script


@pytest.mark.slow
def test_study_runs_and_reuses_its_sources(tmp_path, monkeypatch):
    study = load_script(EXPERIMENTS / "from-transformer" / "study.py", "from_transformer_study")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "max_position_embeddings": 16}
    monkeypatch.setattr(study, "SHAPE", study.SHAPE | small)
    monkeypatch.setattr(study, "LENGTH", 16)
    arguments = [
        "study",
        "--out",
        str(tmp_path),
        "--kinds",
        "gpt2",
        "--steps",
        "30",
        "--more",
        "10",
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    study.main()
    rows = {
        row["name"]: row
        for row in map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    }
    assert rows["source"]["divergence"] == 0
    for form in ("pair", "shift"):
        assert rows[form]["divergence"] < 0.1 * rows["random"]["divergence"]
        assert rows[f"{form}, continued"]["source_loss"] == rows["source"]["loss"]
    biases = 2 * 16  # of the norms
    assert rows["pair"]["parameters"] == rows["random"]["parameters"] + biases
    written = (tmp_path / "gpt2" / "model.safetensors").stat().st_mtime_ns
    study.main()
    assert (tmp_path / "gpt2" / "model.safetensors").stat().st_mtime_ns == written
