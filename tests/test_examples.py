"""Every script in examples/ runs as its docstring says, for a few steps."""

import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
SHORTENED = {"drop_in_layer": ["--steps", "5"], "convert_gpt2": []}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_example_runs(script, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    arguments = SHORTENED.get(script.stem, ["--steps", "2"])
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out
    assert "moved by" in printed or "change of a logit" in printed
    assert f"python examples/{script.name}" in script.read_text()
