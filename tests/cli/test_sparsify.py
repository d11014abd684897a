"""`tokenformer sparsify`: a folder in, a folder out, or one line and nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.growth import trained_tokenformer
from tokenformer.cli import main
from tokenformer.data.byte_tokenizer import VOCAB_SIZE, byte_tokenizer

TEXT = "The quick brown fox — naïve, perhaps — jumps over the lazy dog.\n" * 60


@pytest.fixture
def home(tmp_path: Path, make_config: Any, capsys: Any, monkeypatch: Any) -> Path:
    model, _ = trained_tokenformer(make_config, vocab_size=VOCAB_SIZE)
    model.save_pretrained(tmp_path / "dense")
    byte_tokenizer().save_pretrained(tmp_path / "dense")
    (tmp_path / "text.txt").write_text(TEXT)
    main(["prepare", str(tmp_path / "text.txt"), "--out", str(tmp_path / "data")])
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    return tmp_path


SHARE = ["--active", "0.5", "--group_size", "8"]
SPARSIFY = ["sparsify", "dense", *SHARE, "--data", "data", "--out", "sparse"]


def test_a_sparse_model_with_tokenizer_report_and_card(home: Path, capsys: Any) -> None:
    main([*SPARSIFY, "--distill", "3"])
    shown = capsys.readouterr().out
    assert "active per token" in shown
    assert shown.endswith("Saved to sparse\n")
    model = AutoModelForCausalLM.from_pretrained(home / "sparse")
    assert model.config.active_groups == {"ffn": [6, 6]}
    assert model(torch.arange(40)[None]).logits.isfinite().all()
    assert AutoTokenizer.from_pretrained(home / "sparse")("fox")["input_ids"] == list(b"fox")
    report = json.loads((home / "sparse" / "sparsity.json").read_text())
    assert report["distill_steps"] == 3
    assert report["loss_after"] == pytest.approx(report["loss_before"], abs=0.5)
    assert "Made sparse" in (home / "sparse" / "README.md").read_text()
    main(["inspect", "sparse", "--json"])
    found = json.loads(capsys.readouterr().out)["tokenformer"]
    assert found["active_parameters"]["total"] == report["active_parameters"]
    main(["generate", "sparse", "--prompt", "The", "--max_new_tokens", "4"])


def test_thresholds(home: Path, capsys: Any) -> None:
    main([*SPARSIFY, "--method", "threshold"])
    model = AutoModelForCausalLM.from_pretrained(home / "sparse")
    assert all(value > 0 for value in model.config.thresholds["ffn"])
    assert model.config.active_groups is None
    assert "Made sparse by threshold" in (home / "sparse" / "README.md").read_text()


def test_json_and_other_projections(home: Path, capsys: Any) -> None:
    main([*SPARSIFY, "--projections", "ffn", "o", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert [layer["name"].rpartition(".")[2] for layer in report["layers"]] == ["o", "ffn"] * 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("dense --data data", "--out is missing"),
        ("dense --out sparse", "--data is missing"),
        ("dense --data data --out sparse --active 2", "active=2"),
        ("dense --data data --out sparse --group_size 99", "group_size=99 must be from 1 to 96"),
        ("dense --data data --out sparse --projections mlp", "choose from q, k, v, o, ffn"),
        ("dense --data data --out sparse --length 0", "--length 0 must be at least 1"),
        ("dense --images digits --out sparse", "--images does not apply"),
    ],
)
def test_bad_input_is_one_line_and_no_folder(
    home: Path, capsys: Any, words: str, message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["sparsify", *words.split()])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (home / "sparse").exists()
