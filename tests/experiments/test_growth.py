"""The growth study, for a few steps: it runs, resumes, and its figures are drawn."""

import json
import sys
from dataclasses import replace
from typing import Any

import pytest

from tests.support.scripts import EXPERIMENTS, load_script

FOLDER = EXPERIMENTS / "growth"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`study` and `figures`, which imports it as a script beside it does."""
    names = ("study", "figures")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)  # and restored after the test
    return [load_script(FOLDER / f"{name}.py", name) for name in names]


def test_runs_compare_at_equal_compute(modules):
    study, _ = modules
    for training in [
        study.Training((8,)),
        study.Training((8, 16), (0.3, 0.7)),
        *study.PLANS["transformer"],
    ]:
        from tokenformer.models.accounting import training_flops

        flops = sum(
            steps * study.BATCH * sum(training_flops(training.config(n), study.LENGTH).values())
            for steps, n in zip(training.steps(), training.tokens, strict=True)
        )
        assert flops == pytest.approx(training.compute, rel=0.01)
        assert study.Training.from_row({"key": training.key}) == training


def test_the_published_results_are_runs_of_the_study(modules):
    study, figures = modules
    rows = figures.read_rows(FOLDER / "results.jsonl")
    planned = {training.key for plan in study.PLANS.values() for training in plan}
    assert rows
    assert rows.keys() <= planned
    assert all(row["curve"][-1][-1] == row["bits_per_byte"] for row in rows.values())


@pytest.mark.slow
def test_study_runs_and_resumes(modules, corpus, tmp_path, monkeypatch, capsys):
    study, figures = modules
    tiny = study.Training(compute=2e10)
    grown = replace(tiny, tokens=(8, 32), shares=(0.4, 0.6))
    slow = replace(tiny, rate=1e-3)
    monkeypatch.setitem(study.PLANS, "rates", [tiny, slow, grown])
    monkeypatch.setattr(figures, "COMPUTE", tiny.compute)
    arms = {"from scratch": tiny, "grown": grown}
    monkeypatch.setattr(figures, "COMPARISONS", {"8 to 32 tokens": arms})
    arguments = ["study", str(corpus), "--out", str(tmp_path), "--workers", "1", "--only", "rates"]
    monkeypatch.setattr(sys, "argv", arguments)
    study.main()
    results = tmp_path / "results.jsonl"
    rows = figures.read_rows(results)
    assert list(rows) == [training.key for training in (tiny, slow, grown)]
    assert len(json.loads(results.read_text().splitlines()[-1])["steps"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"], "runs are cleaned up"
    capsys.readouterr()
    study.main()
    assert "3 runs, 0 of them to do" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["figures", str(results), "--out", str(tmp_path)])
    figures.main()
    assert f"| grown | {rows[grown.key]['bits_per_byte']:.3f} |" in capsys.readouterr().out
    for name in ("rate-law.png", "growth-study.png", "growth-curves.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
