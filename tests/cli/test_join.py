"""`tokenformer join`: folders in, a folder out that the Auto classes load."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

import tokenformer
from tests.support.image_text import SIDE, make_halves, pictures, text_ids
from tokenformer.cli import main
from tokenformer.data.byte_tokenizer import byte_tokenizer


@pytest.fixture(scope="module")
def halves(tmp_path_factory: Any) -> tuple[Path, Path]:
    vision, language = make_halves()
    folders = [tmp_path_factory.mktemp(name) for name in ("vision", "language")]
    vision.save_pretrained(folders[0])
    processor = tokenformer.TokenformerImageProcessor.for_size(SIDE, mean=[0.1] * 3, std=[0.2] * 3)
    processor.save_pretrained(folders[0])
    language.save_pretrained(folders[1])
    byte_tokenizer().save_pretrained(folders[1])
    return folders[0], folders[1]


def fails(capsys: Any, *arguments: Any) -> str:
    with pytest.raises(SystemExit) as end:
        main(["join", *map(str, arguments)])
    assert end.value.code == 2
    return str(capsys.readouterr().err)


@pytest.mark.parametrize("mode", ["routed", "shared", "projector"])
def test_the_folder_loads_and_generates(
    mode: str, halves: tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "joint"
    main(["join", *map(str, halves), "--mode", mode, "--new_tokens", "5", "--out", str(out)])
    assert f"Saved to {out}" in capsys.readouterr().out
    model = AutoModelForImageTextToText.from_pretrained(out).eval()
    assert model.config.mode == mode
    processor = AutoProcessor.from_pretrained(out)
    assert list(processor.image_processor.image_mean) == [0.1] * 3  # that of the vision model
    batch = processor(text="<image>a", images=pictures(1), return_tensors="pt")
    assert model.generate(**batch, max_new_tokens=3).shape[0] == 1
    report = json.loads((out / "join.json").read_text())
    assert report["mode"] == mode
    if mode != "shared":
        language = tokenformer.TokenformerForCausalLM.from_pretrained(halves[1]).eval()
        ids = text_ids("some text")
        torch.testing.assert_close(model(ids).logits, language(ids).logits)


def test_json(halves: tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    main(["join", *map(str, halves), "--out", str(tmp_path / "joint"), "--json"])
    assert json.loads(capsys.readouterr().out)["new_tokens"] == 64


def test_bad_input_is_one_line(halves: tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    vision, language = halves
    out = tmp_path / "joint"
    assert "--out is missing" in fails(capsys, vision, language)
    message = fails(capsys, vision, language, "--new_tokens", -1, "--out", out)
    assert "must be at least 0" in message
    message = fails(capsys, language, vision, "--out", out)
    assert "is a language model, not an image classifier" in message
    narrow = make_halves(hidden_size=16)[0]
    narrow.save_pretrained(tmp_path / "narrow")
    message = fails(capsys, tmp_path / "narrow", language, "--out", out)
    assert "hidden_size (16 and 32)" in message
    assert "mode='projector'" in message
    message = fails(capsys, vision, language, "--projector_size", 8, "--out", out)
    assert "--projector_size 8 does not apply to --mode routed" in message
    bare = make_halves()[1]
    bare.save_pretrained(tmp_path / "bare")
    assert "has no tokenizer" in fails(capsys, vision, tmp_path / "bare", "--out", out)
    assert not out.exists()
