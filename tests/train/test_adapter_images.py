"""Adapting image classifiers, with the classes of the model or with others."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.adaptation import adapt, rows_of
from tokenformer import TokenformerForImageClassification, TokenformerVisionConfig
from tokenformer.models.image_processing import TokenformerImageProcessor

pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
from peft import PeftModel

DIGITS = [str(digit) for digit in range(10)]
SHORT = [
    "--steps",
    "4",
    "--batch_size",
    "8",
    "--validate_every",
    "2",
    "--validation_sequences",
    "30",
]


def save_classifier(folder: Path, classes: list[str]) -> Path:
    torch.manual_seed(0)
    config = TokenformerVisionConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_labels=len(classes),
        id2label=dict(enumerate(classes)),
        label2id={name: index for index, name in enumerate(classes)},
    )
    TokenformerForImageClassification(config).save_pretrained(folder)
    TokenformerImageProcessor.for_size(8, 1).save_pretrained(folder)
    return folder


def run(base: Path, out: Path, *options: str) -> Path:
    adapt(base, "--data", "digits", "--out", out, *SHORT, *options)
    return out


def test_the_classes_of_the_model(tmp_path: Path) -> None:
    base = save_classifier(tmp_path / "base", DIGITS)
    out = run(base, tmp_path / "run", "--keep", "digits", "--learning_rate", "0.01")
    rows = [row for row in rows_of(out) if "val_loss" in row]
    assert [row["step"] for row in rows] == [0, 2, 4]
    assert all(row["keep_accuracy"] == row["val_accuracy"] for row in rows)
    assert rows[-1]["val_loss"] < rows[0]["val_loss"]
    names = load_file(out / "adapter" / "adapter_model.safetensors").keys()
    assert names
    assert all("token_adapter" in name for name in names)
    model = TokenformerForImageClassification.from_pretrained(base)
    PeftModel.from_pretrained(model, out / "adapter")


@pytest.mark.parametrize("method", ["tokens", "lora"])
def test_other_classes_get_a_head_that_is_saved_with_the_adapter(
    method: str, tmp_path: Path, capsys: Any
) -> None:
    base = save_classifier(tmp_path / "base", ["cat", "dog", "bird"])
    out = run(base, tmp_path / "run", "--method", method, "--learning_rate", "0.01")
    assert "its classifier trains too" in capsys.readouterr().out
    tensors = load_file(out / "adapter" / "adapter_model.safetensors")
    heads = {name: t.shape for name, t in tensors.items() if "classifier" in name}
    assert sorted(map(tuple, heads.values())) == [(10,), (10, 16)]
    assert json.loads((out / "adapter" / "labels.json").read_text()) == DIGITS
    model = TokenformerForImageClassification.from_pretrained(
        base, num_labels=10, ignore_mismatched_sizes=True
    )
    adapted = PeftModel.from_pretrained(model, out / "adapter").eval()
    with torch.no_grad():
        assert adapted(torch.zeros(1, 1, 8, 8)).logits.shape == (1, 10)


def test_a_new_head_is_part_of_the_model_of_other_methods(tmp_path: Path) -> None:
    base = save_classifier(tmp_path / "base", ["cat", "dog", "bird"])
    out = run(base, tmp_path / "run", "--method", "full")
    model = TokenformerForImageClassification.from_pretrained(out / "model")
    assert [model.config.id2label[index] for index in range(10)] == DIGITS


def test_the_least_used_tokens_of_a_classifier(tmp_path: Path) -> None:
    base = save_classifier(tmp_path / "base", DIGITS)
    options = ["--method", "sparse", "--tokens", "3", "--keep", "digits"]
    out = run(base, tmp_path / "run", *options, "--learning_rate", "0.01")
    before = load_file(base / "model.safetensors")
    after = load_file(out / "model" / "model.safetensors")
    for name, tensor in before.items():
        rows = 3 if ".ffn." in name else 0
        assert (tensor != after[name]).reshape(len(tensor), -1).any(1).sum() == rows


def test_kept_images_have_the_same_classes(tmp_path: Path, capsys: Any) -> None:
    base = save_classifier(tmp_path / "base", DIGITS)
    other = tmp_path / "images"
    from PIL import Image

    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (other / split / name).mkdir(parents=True)
            Image.new("L", (8, 8), 9).save(other / split / name / "a.png")
    with pytest.raises(SystemExit) as end:
        run(base, tmp_path / "run", "--keep", str(other))
    assert end.value.code == 2
    assert "has other classes than digits" in capsys.readouterr().err
