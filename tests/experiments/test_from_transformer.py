"""The conversion study, for a few steps: it runs and reuses the trained sources."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

STUDY = Path(__file__).parents[2] / "experiments" / "from-transformer" / "study.py"


def load_study():
    spec = importlib.util.spec_from_file_location("from_transformer_study", STUDY)
    module = importlib.util.module_from_spec(spec)
    sys.modules["from_transformer_study"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_study_runs_and_reuses_its_sources(tmp_path, monkeypatch):
    study = load_study()
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
