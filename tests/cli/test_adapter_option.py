"""`--adapter` in `generate`, `evaluate` and `predict`: as with a model that the adapter is merged
into."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("peft", reason="peft is not installed")

from peft import PeftModel

from tests.support.adapters import make_adapter
from tests.support.parrot import SENTENCE
from tokenformer import (
    TokenformerForCausalLM,
    TokenformerForImageClassification,
    TokenformerVisionConfig,
)
from tokenformer.cli import main
from tokenformer.models.image_processing import TokenformerImageProcessor


@pytest.fixture(scope="module")
def adapters(parrot, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed, (name, options) in enumerate({"a": {}, "b": {}, "own": {"norm": "own"}}.items()):
        base = TokenformerForCausalLM.from_pretrained(parrot)
        make_adapter(base, root / name / "adapter", seed=seed, std=1.0, **options)
    return root


@pytest.fixture(scope="module")
def merged(parrot, adapters, tmp_path_factory) -> Path:
    """The parrot with adapters a and b merged into it."""
    folder = tmp_path_factory.mktemp("merged") / "model"
    shutil.copytree(parrot, folder)
    model = PeftModel.from_pretrained(
        TokenformerForCausalLM.from_pretrained(parrot), adapters / "a" / "adapter", "a"
    )
    model.load_adapter(adapters / "b" / "adapter", "b")
    model.base_model.set_adapter(["a", "b"])
    model.merge_and_unload(adapter_names=["a", "b"]).save_pretrained(folder)
    return folder


def answer(capsys, *words) -> str:
    main([str(word) for word in words])
    return capsys.readouterr().out


def test_generate(parrot, adapters, merged, capsys):
    words = "--prompt", "Say", "--greedy", "--max_new_tokens", 40
    both = "--adapter", adapters / "a", "--adapter", f"second={adapters / 'b' / 'adapter'}"
    expected = answer(capsys, "generate", merged, *words)
    assert answer(capsys, "generate", parrot, *words, *both) == expected
    listed = "--adapter", both[1], both[3]
    assert answer(capsys, "generate", parrot, *words, *listed) == expected
    plain = answer(capsys, "generate", parrot, *words)
    own = answer(capsys, "generate", parrot, *words, "--adapter", adapters / "own")
    assert len({plain, own, expected}) == 3


def test_evaluate(parrot, adapters, merged, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(SENTENCE * 20)

    def measure(*words):
        found = answer(capsys, "evaluate", *words, "--perplexity", text, "--json")
        return json.loads(found)

    both = "--adapter", adapters / "a", "--adapter", adapters / "b"
    found, expected = measure(parrot, *both), measure(merged)
    bits = found["perplexity"]["bits_per_byte"]
    assert bits == pytest.approx(expected["perplexity"]["bits_per_byte"], rel=1e-5)
    assert found["adapters"] == [str(adapters / "a"), str(adapters / "b")]
    assert bits > measure(parrot)["perplexity"]["bits_per_byte"] + 0.1
    own = measure(parrot, "--adapter", adapters / "own")["perplexity"]["bits_per_byte"]
    assert abs(own - bits) > 1e-3
    eight = measure(parrot, "--bits", 8, *both)["perplexity"]["bits_per_byte"]
    assert eight == pytest.approx(bits, rel=0.05)  # not merged


def test_images(tmp_path, capsys):
    torch.manual_seed(0)
    shape = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2}
    config = TokenformerVisionConfig(**shape, num_attention_heads=2, num_classes=3)
    model = TokenformerForImageClassification(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    base = tmp_path / "base"
    model.save_pretrained(base)
    TokenformerImageProcessor.for_size(8, 3).save_pretrained(base)
    options = {"modules_to_save": ["classifier"]}
    adapter = make_adapter(model, tmp_path / "adapter", seed=1, std=2.0, **options)
    home = tmp_path / "pictures" / "val"
    random = np.random.default_rng(0)
    for label in range(3):
        (home / f"class {label}").mkdir(parents=True)
        for number in range(4):
            pixels = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(home / f"class {label}" / f"{number}.png")
    files = sorted(home.rglob("*.png"))

    def predict(*words):
        return json.loads(answer(capsys, "predict", base, *files, "--json", *words))

    def accuracy(*words):
        words = "--images", home.parent, "--labels_by_index", "--json", *words
        return json.loads(answer(capsys, "evaluate", base, *words))["images"]

    plain, adapted = predict(), predict("--adapter", adapter)
    assert plain != adapted
    assert accuracy() != accuracy("--adapter", adapter)
    top = [adapted[str(file)][0]["label"] for file in files]
    right = sum(
        label.endswith(file.parent.name[-1]) for label, file in zip(top, files, strict=True)
    )
    assert accuracy("--adapter", adapter)["top_1"] == pytest.approx(right / len(files))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--adapter", "runs/none"], "the adapter runs/none does not exist"),
        (["--adapter", "{root}/a", "--adapter", "{root}/a"], "two named a"),
        (["--adapter", "{root}/a/adapter", "a={root}/b"], "two named a"),
        (["--adapter", "{model}"], "a model, not an adapter"),
    ],
)
def test_bad_adapters_are_one_line(parrot, adapters, words, named, capsys):
    words = [word.format(root=adapters, model=parrot) for word in words]
    with pytest.raises(SystemExit) as end:
        main(["generate", str(parrot), "--prompt", "a", *words])
    captured = capsys.readouterr()
    assert end.value.code == 2
    assert captured.err.count("\n") == 1
    assert named in captured.err


def test_another_base_is_one_line(parrot, adapters, merged, capsys):
    with pytest.raises(SystemExit) as end:
        main(["generate", str(merged), "--prompt", "a", "--adapter", str(adapters / "a")])
    assert end.value.code == 2
    assert "not on this model" in capsys.readouterr().err
