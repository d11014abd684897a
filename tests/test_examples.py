"""Every script and notebook in examples/ runs, for a few steps."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
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


@pytest.mark.slow
@pytest.mark.parametrize("notebook", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_runs(notebook, tmp_path):
    """The code cells run in order, with fewer steps; their assertions hold."""
    cells = json.loads(notebook.read_text())["cells"]
    code = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    shortened = code.replace("STEPS = 128, 8, 300", "STEPS = 128, 8, 15")
    assert shortened != code
    environment = os.environ | {"MPLBACKEND": "Agg"}
    command = [sys.executable, "-W", "error::FutureWarning", "-c", shortened]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    printed = dict(line.split(":") for line in done.stdout.splitlines() if "growth:" in line)
    before, after = (printed[f"held-out loss {when} growth"] for when in ("before", "after"))
    assert float(before) == pytest.approx(float(after), abs=2e-6)


def test_notebook_keeps_its_outputs():
    """The committed notebook has been run: readers on GitHub see the text and the plot."""
    for notebook in EXAMPLES.glob("*.ipynb"):
        assert notebook.stat().st_size < 100_000
        cells = json.loads(notebook.read_text())["cells"]
        outputs = [output for cell in cells for output in cell.get("outputs", [])]
        assert any("image/png" in output.get("data", {}) for output in outputs)
        assert not [output for output in outputs if output["output_type"] == "error"]
