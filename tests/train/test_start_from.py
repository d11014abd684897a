"""Runs that start from a trained model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.training import language_model
from tokenformer import TokenformerForImageClassification, TokenformerVisionConfig
from tokenformer.cli import main
from tokenformer.data.byte_tokenizer import byte_tokenizer
from tokenformer.train.metrics import read_metrics


def test_a_model_in_half_precision_is_trained_on_resumed_and_converted(
    recipe: Path, tmp_path: Path, capsys: Any
) -> None:
    language_model(tmp_path / "start")
    out = tmp_path / "run"
    words = ["train", str(recipe), "--out", str(out), "--model.start_from", str(tmp_path / "start")]
    words += ["--model.options", "{}"]
    main([*words, "--run.steps", "5"])
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "start", dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    assert model.dtype == torch.float32
    for name, parameter in model.named_parameters():
        moved = (parameter - start.get_parameter(name)).abs().max()
        assert 0 < moved < 0.2, f"{name} began where it was"
    main([*words, "--run.steps", "10", "--override"])
    assert [row["step"] for row in read_metrics(out / "metrics.jsonl")] == list(range(1, 11))
    main(["convert", str(out / "checkpoints" / "step-00000010"), "--out", str(tmp_path / "hf")])
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    exported = load_file(out / "model" / "model.safetensors")
    assert torch.equal(again.model.norm.weight, exported["model.norm.weight"])


def refused(words: list[str], capsys: Any) -> str:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    said: str = capsys.readouterr().err
    return said


def test_what_a_run_does_not_begin_with(recipe: Path, tmp_path: Path, capsys: Any) -> None:
    def words(name: str) -> list[str]:
        start = ["--model.start_from", str(tmp_path / name), "--model.options", "{}"]
        return ["train", str(recipe), "--out", str(tmp_path / "run"), *start]

    language_model(tmp_path / "few", vocab_size=99)
    assert "has a vocabulary of 257, the model one of 99" in refused(words("few"), capsys)

    language_model(tmp_path / "other")
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    file.write_text(file.read_text().replace('"A":', '"AA":'))
    assert "has other token ids than the model's tokenizer" in refused(words("other"), capsys)

    language_model(tmp_path / "torn")
    weights = tmp_path / "torn" / "model.safetensors"
    tensors = load_file(weights)
    tensors.pop("model.norm.weight")
    save_file(tensors, weights, {"format": "pt"})
    assert "missing model.norm.weight" in refused(words("torn"), capsys)


def test_a_classifier_is_trained_on(tmp_path: Path, capsys: Any) -> None:
    torch.manual_seed(1)
    config = TokenformerVisionConfig(
        image_size=8, patch_size=4, num_channels=1, num_labels=10, hidden_size=16,
        num_hidden_layers=1, num_attention_heads=2,
    )  # fmt: skip
    TokenformerForImageClassification(config).half().save_pretrained(tmp_path / "start")
    (tmp_path / "r.yaml").write_text(f"""
model: {{start_from: {tmp_path / "start"}}}
data: {{images: digits}}
run: {{steps: 3, batch_size: 8, validate_every: 3, checkpoint_every: 3, validation_sequences: 9}}
schedule: {{warmup_steps: 1}}
""")
    words = ["train", str(tmp_path / "r.yaml"), "--out", str(tmp_path / "run")]
    main(words)
    main([*words, "--run.steps", "5", "--override"])
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 5
    trained = TokenformerVisionConfig.from_pretrained(tmp_path / "run" / "model")
    assert trained.id2label == {n: str(n) for n in range(10)}, "the names are those of the images"
    assert trained.label2id["7"] == 7
    config.num_labels = 7
    TokenformerForImageClassification(config).save_pretrained(tmp_path / "start")
    assert "has 7 classes, the images have 10" in refused(
        [*words[:3], str(tmp_path / "other")], capsys
    )


def test_a_trained_model_at_a_high_rate_is_warned_of(
    recipe: Path, tmp_path: Path, capsys: Any
) -> None:
    trained = tmp_path / "trained"
    main(["train", str(recipe), "--out", str(trained), "--run.validate_every", "24"])
    assert "Warning" not in capsys.readouterr().out
    again = ["train", str(recipe), "--model.start_from", str(trained), "--max_steps", "8"]
    high = ["--out", str(tmp_path / "high"), "--optimizer.learning_rate", "0.4"]
    main([*again, *high, "--run.spike_factor", "99", "--optimizer.clip_norm", "null"])
    said = capsys.readouterr().out
    assert "is meant for fresh weights" not in said, "the rate was chosen"
    assert f"Held-out loss of {trained}/model: " in said
    assert "Warning: the held-out loss rose from " in said
    assert "lower optimizer.learning_rate or lengthen schedule.warmup_steps" in said
    main([*again, "--out", str(tmp_path / "full"), "--run.validate_every", "0"])
    assert (
        f"the learning rate 0.01 of {recipe} is meant for fresh weights and may undo what "
        f"{trained}/model has learned; try --optimizer.learning_rate 0.001 and a longer "
        "--schedule.warmup_steps"
    ) in capsys.readouterr().out
