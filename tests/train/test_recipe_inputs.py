"""Inputs of a run are found from any folder, and checked before torch is imported."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.training import SECTIONS
from tokenformer.cli import main
from tokenformer.train.run import read_metrics


@pytest.fixture
def clone(corpus: Path, tmp_path: Path) -> Path:
    """A folder as a clone is: recipes/laptop/r.yaml says data/text."""
    folder = tmp_path / "clone"
    shutil.copytree(corpus, folder / "data" / "text")
    (folder / "recipes" / "laptop").mkdir(parents=True)
    sections = {**SECTIONS, "data": {"length": 32, "corpus": "data/text"}}
    sections["run"] = {**SECTIONS["run"], "steps": 2, "checkpoint_every": 1, "log_to": []}
    (folder / "recipes" / "laptop" / "r.yaml").write_text(json.dumps(sections))
    return folder


def refused(words: list[Any], capsys: Any) -> str:
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    assert end.value.code == 2
    said: str = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_a_recipe_works_from_any_folder(
    clone: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    recipe = clone / "recipes" / "laptop" / "r.yaml"
    monkeypatch.chdir(elsewhere)
    train = ["train", str(recipe), "--out", str(tmp_path / "run")]
    main([*train, "--max_steps", "1"])
    data = clone / "data" / "text"
    assert f"data/text is not in the working folder; using {data}" in capsys.readouterr().out
    record = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert record["data"]["corpus"] == str(data)
    # The command line means the working folder.
    given = ["--data.corpus", "data/texts"]
    assert "data.corpus: no data/texts" in refused([*train[:2], *given], capsys)

    # It resumes from the clone too, and with the recipe away from its data.
    monkeypatch.chdir(clone)
    recipe.rename(elsewhere / "r.yaml")
    monkeypatch.chdir(elsewhere)
    main(["train", "r.yaml", "--out", str(tmp_path / "run"), "--run.steps", "2", "--override"])
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 2

    # Another corpus of the same name in the working folder is another corpus.
    shutil.copytree(clone / "data", elsewhere / "data")
    again = ["train", "r.yaml", "--out", tmp_path / "run", "--run.steps", "3"]
    assert f"data.corpus {data} -> {elsewhere}/data/text" in refused(again, capsys)


def test_a_corpus_without_validation(
    corpus: Path, recipe: Path, tmp_path: Path, capsys: Any
) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("token key value " * 200)
    data = tmp_path / "data"
    main(["prepare", str(text), "--out", str(data), "--validation", "0"])
    capsys.readouterr()
    out = tmp_path / "run"
    train = ["train", str(recipe), "--out", str(out), "--data.corpus", str(data)]
    said = refused(train, capsys)
    assert "has no split validation; it has train; prepare the text with --validation 0.05" in said
    assert "or train without validation: --run.validate_every 0" in said
    assert not out.exists()
    main([*train, "--run.validate_every", "0", "--max_steps", "12"])
    said = capsys.readouterr().out
    assert "loss " in said
    assert "held-out" not in said
    rows = read_metrics(out / "metrics.jsonl")
    assert len(rows) == 12
    assert not any("val_loss" in row for row in rows)
    assert (out / "loss.png").stat().st_size > 1000
    kept = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert kept == ["step-00000010", "step-00000012"]


def test_a_short_split_is_named_with_its_size(recipe: Path, tmp_path: Path, capsys: Any) -> None:
    for name, words in (("train", 500), ("validation", 10)):
        (tmp_path / "text" / name).mkdir(parents=True)
        (tmp_path / "text" / name / "a.txt").write_text("key " * words)
    data = tmp_path / "data"
    main(["prepare", str(tmp_path / "text"), "--out", str(data)])
    capsys.readouterr()
    train = ["train", recipe, "--data.corpus", data, "--data.length"]
    said = refused([*train, 64], capsys)
    assert f"split validation of {data} has 41 tokens, one sequence needs 65; lower" in said
    assert "--run.validate_every 0" in said
    said = refused([*train, 4000], capsys)
    assert f"split train of {data} has 2,001 tokens, one sequence needs 4,001; lower" in said


def test_mistakes_are_refused_before_torch_is_imported(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "config.yaml").write_text("model: {options: {hidden")
    (tmp_path / "empty").mkdir()
    train = ["train", str(recipe), "--out", str(tmp_path / "new")]
    mistakes = {
        "did you mean": ["train", str(recipe.with_suffix(".yml"))],
        "config.yaml, line 1: not valid YAML": [*train[:3], str(out)],
        "no data/nothing": [*train, "--data.corpus", "data/nothing"],
        "start_from: no ./nothing": [*train, "--model.start_from", "./nothing"],
        "has no config.json": [*train, "--model.start_from", str(tmp_path / "empty")],
        "preset '125m' is unknown": [*train, "--model.preset", "125m"],
        "images: no ./nothing": [*train, "--data.images", "./nothing"],
        "--max_steps 0 must be at least 1": [*train, "--max_steps", "0"],
        "wandb is not installed": [*train, "--run.log_to", "wandb"],
    }
    code = (
        "import sys\nfrom tokenformer.cli import main\n"
        f"for words in {list(mistakes.values())}:\n"
        "    try: main(words)\n    except SystemExit as end: assert end.code == 2, words\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(mistakes)
    for message, line in zip(mistakes, lines, strict=True):
        assert message in line
    assert not (tmp_path / "new").exists()
