"""The study of the seam on a few steps: it runs, goes on, and says what it found."""

import importlib.util
import json
import sys
from pathlib import Path

STUDY = Path(__file__).parents[2] / "experiments" / "seam" / "study.py"


def load_study():
    spec = importlib.util.spec_from_file_location("seam_study", STUDY)
    module = importlib.util.module_from_spec(spec)
    sys.modules["seam_study"] = module
    spec.loader.exec_module(module)
    return module


def test_the_study_runs_and_goes_on(corpus, tmp_path, monkeypatch, capsys):
    study = load_study()
    tiny = study.Regime(study.tokens(8, 16), study.tokens(16, 40), 25, 3, 25)
    monkeypatch.setitem(study.REGIMES, "short", tiny)
    words = ["study", str(corpus), "--out", str(tmp_path), "--workers", "1"]
    words += ["--only", "zero, mean", "zero, reset, after the decay", "not grown"]
    monkeypatch.setattr(sys, "argv", words)
    study.main()
    first = (tmp_path / "results.jsonl").read_text()
    results = [json.loads(line) for line in first.splitlines()]
    assert [result["name"] for result in results] == words[-3:]
    grown, _, alone = results
    assert grown["flops"] > alone["flops"]
    assert grown["tokens"] == alone["tokens"]
    assert dict(map(tuple, grown["curve"]))[25] == grown["seam"] == alone["seam"]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    study.main()  # everything is there already
    assert (tmp_path / "results.jsonl").read_text() == first
    assert capsys.readouterr().out.count("seam") == 6
