"""Models on the command line: model folders, run folders and hub names; damaged folders."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.commands import error_line
from tokenformer.cli import main


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "FOLDER", "--prompt", "a"],
        ["grow", "FOLDER", "--ffn_tokens", "9", "--out", "x"],
    ],
    ids=lambda words: words[0],
)
def test_code_in_a_folder_is_not_run(words, tmp_path, monkeypatch, capsys):
    """Also where the standard input, which may be a prompt, would answer "y" if it were asked."""
    folder, ran = tmp_path / "model", tmp_path / "ran"
    folder.mkdir()
    classes = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": classes}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "code.py").write_text(f"open({str(ran)!r}, 'w').close()")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\ny\n"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main([str(folder) if word == "FOLDER" else word for word in words])
    assert end.value.code == 2
    assert "contains custom code" in capsys.readouterr().err
    assert not ran.exists()


@pytest.fixture
def copied(parrot, tmp_path):
    """A copy of a model folder, to be damaged."""
    return Path(shutil.copytree(parrot, tmp_path / "copied"))


def test_spoiled_weights_are_told_in_a_line(copied, capsys):
    words = ["generate", copied, "--prompt", "a"]
    file = copied / "model.safetensors"
    tensors = load_file(file)
    spoiled = {**tensors, "model.norm.weight": torch.ones(3)}
    spoiled.pop("model.norm.bias")
    save_file(spoiled, file, {"format": "pt"})
    said = error_line(words, capsys)
    assert "missing model.norm.bias" in said
    assert "wrong shape of model.norm.weight [3] instead of [32]" in said
    save_file(tensors, file, {"format": "pt"})
    file.write_bytes(file.read_bytes()[:-100])
    assert f"{copied} cannot be loaded" in error_line(words, capsys)


@pytest.mark.parametrize("model", ["parrot", "neox"])
def test_a_folder_without_a_tokenizer_is_error_line(model, request, tmp_path, capsys):
    folder = shutil.copytree(request.getfixturevalue(model), tmp_path / "bare")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert (folder / "modeling_tokenformer.py").exists() == (model == "parrot")
    capsys.readouterr()
    said = error_line(["generate", folder, "--prompt", "a"], capsys)
    assert f"{folder} has no tokenizer" in said


def test_paths_do_not_go_to_the_hub(copied, capsys):
    weights = copied / "model.safetensors"
    assert "is a file; give the model folder" in error_line(
        ["generate", weights, "--prompt", "a"], capsys
    )
    for path in (copied / "absent", "./absent", "some/folder/absent"):
        assert f"generate: no {path}\n" in error_line(["generate", path, "--prompt", "a"], capsys)


def test_inspect_takes_a_run_folder(parrot, tmp_path, capsys):
    shutil.copytree(parrot, tmp_path / "run" / "model")
    main(["inspect", str(tmp_path / "run"), "--json"])
    assert json.loads(capsys.readouterr().out)["tokenformer"]["width"] == 32


def test_prune_merge_and_grow_take_a_run_folder(parrot, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(parrot, run / "model")
    for name, words in {
        "pruned": ["prune", run],
        "merged": ["merge", run, parrot],
        "grown": ["grow", run, "--ffn_tokens", 80],
    }.items():
        main([str(word) for word in [*words, "--out", tmp_path / name]])
        assert (tmp_path / name / "model.safetensors").exists()
        assert (tmp_path / name / "tokenizer.json").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "NAME", "--prompt", "a"],
        ["evaluate", "NAME", "--perplexity", "."],
        ["predict", "NAME", "."],
        ["prune", "NAME", "--out", "new"],
        ["merge", "NAME", "NAME", "--out", "new"],
        ["inspect", "NAME"],
    ],
    ids=lambda words: words[0],
)
def test_a_name_that_is_nowhere_is_refused_after_one_question(words, tmp_path, monkeypatch, capsys):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody answers
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    said = error_line(["owner/name" if word == "NAME" else word for word in words], capsys)
    assert "owner/name is neither a folder here nor a model on the hub (could not connect)" in said
    assert not (tmp_path / "new").exists()


def test_a_config_that_is_none_is_told_in_a_line(copied, capsys):
    for text, message in (
        ("null", "config.json is not a model's configuration"),
        ("{", "config.json is not JSON"),
    ):
        (copied / "config.json").write_text(text)
        assert message in error_line(["generate", copied, "--prompt", "a"], capsys)


def test_a_run_without_a_model_says_so(tmp_path, capsys):
    (tmp_path / "config.yaml").touch()
    said = error_line(["generate", tmp_path, "--prompt", "a"], capsys)
    assert "has no config.json; the run has no model yet" in said
