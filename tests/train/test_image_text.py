"""Runs on images with text: the same loop, checkpoints, resume and ranks as for text."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.support.image_text import make_halves
from tests.support.processes import run
from tokenformer.cli import main
from tokenformer.data.byte_tokenizer import byte_tokenizer
from tokenformer.train.metrics import read_metrics

COLORS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (20, 40, 230)}
MODEL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "rotary_fraction": 0.5,
    "qkv_tokens": 32,
    "output_tokens": 32,
    "ffn_tokens": 64,
    "new_tokens": 8,
    "vision_config": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    },
}
SECTIONS: dict[str, Any] = {
    "model": {"options": MODEL},
    "data": {"length": 16},
    "optimizer": {"learning_rate": 0.01},
    "schedule": {"warmup_steps": 2},
    "run": {
        "steps": 6,
        "batch_size": 4,
        "micro_batch_size": 1,  # two ranks of a batch of four then accumulate twice
        "checkpoint_every": 3,
        "keep_last": 9,
        "validate_every": 3,
        "validation_sequences": 6,
        "ema": 0.9,
        "log_to": [],
    },
}


@pytest.fixture(scope="module")
def colors(tmp_path_factory: Any) -> Path:
    """Plain images with the names of their colours, some text without an image, and chats."""
    folder = tmp_path_factory.mktemp("colors")
    for split, count in (("train", 8), ("validation", 3)):
        rows: list[dict[str, Any]] = []
        for name, color in COLORS.items():
            for number in range(count):
                file = f"{split}-{name}-{number}.png"
                noise = np.random.default_rng(number).integers(-20, 20, (16, 16, 3))
                pixels = np.clip(np.array(color) + noise, 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / file)
                rows.append({"image": file, "caption": name})
        rows.append({"image": None, "caption": "no image"})
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def write_recipe(tmp_path: Path, colors: Path) -> Any:
    def write(**changes: Any) -> Path:
        sections = {name: {**part, **changes.pop(name, {})} for name, part in SECTIONS.items()}
        sections["data"] = {"image_text": str(colors), **sections["data"]}
        path = tmp_path / "r.yaml"
        path.write_text(json.dumps({**sections, **changes}))
        return path

    return write


@pytest.fixture(scope="module")
def halves(tmp_path_factory: Any) -> list[str]:
    """The folders of a vision and a language model, with their processors."""
    import tokenformer

    vision, language = make_halves()
    folders = [tmp_path_factory.mktemp(name) for name in ("vision", "language")]
    vision.save_pretrained(folders[0])
    tokenformer.TokenformerImageProcessor.for_size(16).save_pretrained(folders[0])
    language.save_pretrained(folders[1])
    byte_tokenizer().save_pretrained(folders[1])
    return [str(folder) for folder in folders]


def losses(folder: Path) -> list[tuple[Any, ...]]:
    names = ("step", "loss", "val_loss", "val_bpb")
    return [tuple(row.get(n) for n in names) for row in read_metrics(folder / "metrics.jsonl")]


@pytest.mark.parametrize("mode", ["routed", "shared", "projector"])
def test_a_run_learns_to_see(mode: str, write_recipe: Any, tmp_path: Path, capsys: Any) -> None:
    recipe = write_recipe(
        model={"options": MODEL | {"mode": mode}},
        run={
            "steps": 60,
            "batch_size": 16,
            "micro_batch_size": 16,
            "checkpoint_every": 60,
            "validate_every": 30,
            "ema": None,
        },
    )
    out = tmp_path / "run"
    main(["train", str(recipe), "--out", str(out)])
    assert "25 samples to train on" in capsys.readouterr().out
    rows = read_metrics(out / "metrics.jsonl")
    assert rows[-1]["val_bpb"] < 0.6 * rows[29]["val_bpb"] or rows[-1]["val_bpb"] < 0.3
    model = AutoModelForImageTextToText.from_pretrained(out / "model").eval()
    processor = AutoProcessor.from_pretrained(out / "model")
    if mode == "projector":  # the features of an untrained, frozen encoder
        return
    for name, color in COLORS.items():
        image = Image.new("RGB", (16, 16), color)
        batch = processor(text="<image>", images=image, return_tensors="pt")
        found = model.generate(**batch, max_new_tokens=8, do_sample=False)
        assert processor.decode(found[0], skip_special_tokens=True) == name


def test_a_resumed_run_ends_as_an_unbroken_one(write_recipe: Any, tmp_path: Path) -> None:
    recipe = write_recipe()
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    main(["train", str(recipe), "--out", str(whole)])
    shutil.copytree(whole, broken)
    shutil.rmtree(broken / "checkpoints" / "step-00000006")
    shutil.rmtree(broken / "model")
    main(["train", str(recipe), "--out", str(broken)])
    assert losses(broken) == losses(whole)
    first, second = (load_file(f / "model" / "model.safetensors") for f in (whole, broken))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_micro_batches_do_not_change_the_loss(write_recipe: Any, tmp_path: Path) -> None:
    recipe = write_recipe(run={"steps": 3, "validate_every": 3, "checkpoint_every": 3})
    found = []
    for size in ("1", "4"):
        out = tmp_path / size
        main(["train", str(recipe), "--out", str(out), "--run.micro_batch_size", size])
        found.append(losses(out))
    for ours, theirs in zip(*found, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_give_the_losses_of_one(parallel: str, write_recipe: Any, tmp_path: Path) -> None:
    """Also with batches on a rank that have no image, whose embedding then gets no gradient."""
    recipe = write_recipe()
    main(["train", str(recipe), "--out", str(tmp_path / "one")])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    rest = ["--standalone", "-m", "tokenformer", "train", str(recipe), "--out"]
    options = [str(tmp_path / "two"), "--run.parallel", parallel]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run([*launcher, *rest, *options], check=True, env=environment)
    for ours, theirs in zip(losses(tmp_path / "two"), losses(tmp_path / "one"), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


def test_alignment_trains_only_the_new_tokens(
    halves: list[str], write_recipe: Any, tmp_path: Path
) -> None:
    joint = tmp_path / "joint"
    main(["join", *halves, "--new_tokens", "7", "--out", str(joint)])
    recipe = write_recipe(
        model={"options": {}, "start_from": str(joint)},
        optimizer={
            "rates": {"*": 0, "*_tokens": 1},
            "part_rates": {"vision": 0, "language": 0},
        },
        run={"ema": None, "steps": 3},
    )
    main(["train", str(recipe), "--out", str(tmp_path / "run")])
    before = load_file(joint / "model.safetensors")
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    config = json.loads((joint / "config.json").read_text())
    vision = config["vision_config"]["ffn_tokens"]
    for name, tensor in before.items():
        if not name.endswith("_tokens"):
            assert torch.equal(tensor, after[name]), name
            continue
        start = vision if ".ffn." in name else 18 if ".o." in name else 20
        frozen = [slice(0, start), slice(start + 7, None)]
        assert all(torch.equal(tensor[rows], after[name][rows]) for rows in frozen), name
        assert not torch.equal(tensor[start : start + 7], after[name][start : start + 7]), name
    # Instruction tuning goes on from there, with everything trained.
    recipe = write_recipe(
        model={"options": {}, "start_from": str(tmp_path / "run")},
        run={"ema": None, "steps": 2},
    )
    main(["train", str(recipe), "--out", str(tmp_path / "tuned")])
    tuned = load_file(tmp_path / "tuned" / "model" / "model.safetensors")
    assert not torch.equal(tuned["model.norm.weight"], after["model.norm.weight"])
    saved = json.loads((tmp_path / "tuned" / "model" / "config.json").read_text())
    assert saved["token_rates"] is None


def test_the_encoder_of_a_projector_stays_frozen(
    halves: list[str], write_recipe: Any, tmp_path: Path
) -> None:
    joint = tmp_path / "joint"
    main(["join", *halves, "--mode", "projector", "--out", str(joint)])
    recipe = write_recipe(
        model={"options": {}, "start_from": str(joint)},
        optimizer={"rates": {"model.images.encoder.*": 0}},
        run={"ema": None, "steps": 4},
    )
    main(["train", str(recipe), "--out", str(tmp_path / "run")])
    before = load_file(joint / "model.safetensors")
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert not {name for name in changed if "encoder" in name}
    assert {name for name in changed if "projector" in name}


def test_a_corrupt_image_stops_the_run_by_name(
    colors: Path, write_recipe: Any, tmp_path: Path, capsys: Any
) -> None:
    shutil.copytree(colors, tmp_path / "data")
    (tmp_path / "data" / "train-red-3.png").write_bytes(b"broken")
    recipe = write_recipe(
        data={"length": 16, "image_text": str(tmp_path / "data")},
        run={"steps": 7},  # an epoch
    )
    with pytest.raises(SystemExit) as end:
        main(["train", str(recipe), "--out", str(tmp_path / "refused")])
    assert end.value.code == 2
    assert "cannot be read as an image" in capsys.readouterr().err
    options = ["--data.on_corrupt", "skip", "--data.workers", "2"]
    main(["train", str(recipe), "--out", str(tmp_path / "skipped"), *options])
    assert len(losses(tmp_path / "skipped")) == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data.image_text", "nowhere/at/all"], "data.image_text: no nowhere/at/all"),
        (["--data.corpus", "x"], "cannot both be trained on"),
        (["--data.images", "digits"], "cannot both be trained on"),
        (["--model.family", "transformer"], "has no vision-language model"),
        (["--run.tensor_parallel", "2"], "trained without stages"),
        (["--data.length", "4000"], "more than the 2048 of the model"),
        (["--augmentation.mixup", "0.5"], "augmentation is for images with classes"),
        (["--optimizer.part_rates", "{tail: 0}"], "must have factors of at least 0 for vision"),
        (["--model.options.mode", "mixed"], "mode='mixed'"),
        (["--data.tokenizer", "no/such.json"], "no/such.json"),
    ],
)
def test_bad_options_are_one_line(
    write_recipe: Any, tmp_path: Path, capsys: Any, options: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", str(write_recipe()), "--out", str(tmp_path / "run"), *options])
    assert end.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_part_rates_are_refused_for_text(tmp_path: Path, capsys: Any) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(json.dumps({"data": {"images": "digits"}}))
    with pytest.raises(SystemExit):
        main(["train", str(recipe), "--dry_run", "--optimizer.part_rates", "{new: 0}"])
    assert "part_rates={'new': 0.0} is for data.image_text" in capsys.readouterr().err


@pytest.mark.slow
def test_the_paper_scale_recipe_takes_a_dry_step(colors: Path, tmp_path: Path) -> None:
    """base + 124m, on small images and bytes, but for the batch."""
    recipe = Path(__file__).parents[2] / "recipes" / "vision-language" / "base-124m-align.yaml"
    options = {
        "--data.image_text": colors,
        "--data.tokenizer": "bytes",
        "--data.workers": 0,
        "--run.batch_size": 2,
        "--run.micro_batch_size": 1,
        "--run.precision": "fp32",
        "--run.validate_every": 0,
        "--run.log_to": "[]",
        "--max_steps": 1,
    }
    words = [str(word) for pair in options.items() for word in pair]
    main(["train", str(recipe), "--out", str(tmp_path / "run"), *words])
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "run" / "model")
    assert model.num_parameters() > 200_000_000
    assert len(losses(tmp_path / "run")) == 1


def test_dry_run(write_recipe: Any, capsys: Any) -> None:
    main(["train", str(write_recipe()), "--dry_run"])
    printed = capsys.readouterr().out
    assert "an image and 16 tokens of text" in printed
    assert "samples" in printed
