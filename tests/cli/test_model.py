"""Models that verbs load: a folder is data, whatever it brings along."""

import io
import json
import sys

import pytest

from tokenformer.cli import main


@pytest.mark.parametrize(
    "verb",
    [
        ["generate", "FOLDER", "--prompt", "a"],
        ["grow", "FOLDER", "--ffn_tokens", "9", "--out", "x"],
    ],
    ids=lambda verb: verb[0],
)
def test_code_in_a_folder_is_not_run(verb, tmp_path, monkeypatch, capsys):
    """Also where the standard input, which may be a prompt, would answer "y" if it were asked."""
    folder, ran = tmp_path / "model", tmp_path / "ran"
    folder.mkdir()
    classes = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": classes}))
    (folder / "code.py").write_text(f"open({str(ran)!r}, 'w').close()")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\ny\n"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main([str(folder) if word == "FOLDER" else word for word in verb])
    assert end.value.code == 2
    assert "contains custom code" in capsys.readouterr().err
    assert not ran.exists()
