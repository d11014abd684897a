"""The growth study at one rate, for a few steps: it runs, resumes and prints its tables."""

import json
import sys

import pytest

from tests.support.scripts import EXPERIMENTS, load_script


@pytest.mark.slow
def test_study_runs_and_resumes(corpus, tmp_path, monkeypatch, capsys):
    study = load_script(EXPERIMENTS / "growth" / "one_rate.py", "growth_one_rate")
    tiny = study.Regime(study.tokens(8, 16), study.tokens(16, 40), 25, 4, 1)
    monkeypatch.setitem(study.REGIMES, "short", tiny)
    arguments = [
        "study",
        str(corpus),
        "--out",
        str(tmp_path),
        "--workers",
        "1",
        "--seeds",
        "0",
        "1",
    ]
    arguments += ["--only", "zero, mean", "zero_value, after the decay", "large from scratch"]
    monkeypatch.setattr(sys, "argv", arguments)
    study.main()
    first = (tmp_path / "results-short.jsonl").read_text()
    results = [json.loads(line) for line in first.splitlines()]
    assert [(r["name"], r["seed"]) for r in results] == [
        (n, s) for s in (0, 1) for n in arguments[-3:]
    ]
    grown, decayed, alone = results[:3]
    assert grown["at_growth"] in [bits for step, _, bits in grown["curve"] if step == 25]
    assert decayed["tokens"] == grown["tokens"]
    assert (tmp_path / "small-decayed-0").exists()
    assert alone["at_growth"] is None
    assert alone["flops"] == pytest.approx(grown["flops"], rel=0.02), "the same compute"
    assert alone["tokens"] < grown["tokens"], "in fewer, larger steps"
    assert (tmp_path / "curves-short.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out.splitlines()
    mean = (results[0]["end"] + results[3]["end"]) / 2
    assert f"{mean:.3f} ± " in next(line for line in printed if line.startswith("| zero, mean |"))
    study.main()  # everything is trained already
    assert (tmp_path / "results-short.jsonl").read_text() == first
