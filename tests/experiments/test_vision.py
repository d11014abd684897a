"""The vision study, for a few steps: every run works and resumes."""

import json
import sys

import pytest

from tests.support.scripts import EXPERIMENTS, load_script


@pytest.mark.slow
def test_study_runs_and_resumes(real_data, tmp_path, monkeypatch, capsys):
    study = load_script(EXPERIMENTS / "vision" / "study.py", "vision_study")
    monkeypatch.setattr(study, "BATCH", 4)
    monkeypatch.setattr(study, "HELD_OUT", 40)
    arguments = ["study", str(real_data("image/fashion-mnist")), "--out", str(tmp_path)]
    monkeypatch.setattr(
        sys, "argv", [*arguments, "--workers", "1", "--seeds", "0", "--steps", "12"]
    )
    study.main()
    first = (tmp_path / "results.jsonl").read_text()
    results = {row["name"]: row for row in map(json.loads, first.splitlines())}
    assert results.keys() == study.RUNS.keys()
    base = results["TokenFormer"]
    assert results["ViT"]["parameters"] == base["parameters"]
    assert results["grown, zero"]["parameters"] == base["parameters"] > 200_000
    assert results["small"]["parameters"] < 120_000
    for name in ("grown, zero", "grown, zero_value", "small"):
        assert results[name]["flops"] == pytest.approx(base["flops"], rel=0.05), "equal compute"
    for name in ("grown, zero", "grown, zero_value"):
        assert results[name]["layer_change"] < 1e-5
        assert results[name]["grown_at"] == pytest.approx(base["flops"] / 2, rel=0.05)
    for name in ("accuracies.png", "growth.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert f"| GELU + L1 | {100 * results['GELU + L1']['accuracy']:.2f} ± 0.00 | 81.7 |" in printed
    study.main()  # everything is trained already
    assert (tmp_path / "results.jsonl").read_text() == first
