"""Runs on images: the same loop, checkpoints, resume, ranks and stages as for text."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification

from tests.support.processes import run, started, wait_until
from tokenformer.cli import main
from tokenformer.train.metrics import read_metrics

MODEL = {
    "patch_size": 4,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "qkv_tokens": 16,
    "output_tokens": 16,
    "ffn_tokens": 32,
    "variant": "paper",
}
SECTIONS: dict[str, Any] = {
    "model": {"options": {**MODEL, "drop_path_rate": 0.1}},
    "data": {"images": "digits"},
    "augmentation": {
        "crop": "padded",
        "randaugment": 1,
        "mixup": 0.2,
        "cutmix": 0.2,
        "label_smoothing": 0.1,
    },
    "optimizer": {"learning_rate": 0.005},
    "schedule": {"warmup_steps": 3},
    "run": {
        "steps": 20,
        "batch_size": 8,
        "micro_batch_size": 2,  # two ranks of a batch of eight then accumulate twice
        "ema": 0.9,
        "checkpoint_every": 5,
        "keep_last": 9,
        "validate_every": 5,
        "validation_sequences": 30,
    },
}


def write_recipe(path: Path, **changes: Any) -> Path:
    sections = {name: {**section, **changes.pop(name, {})} for name, section in SECTIONS.items()}
    path.write_text(json.dumps({**sections, **changes}))
    return path


def losses(folder: Path) -> list[tuple[Any, ...]]:
    names = ("step", "loss", "val_loss", "val_accuracy")
    return [
        tuple(row.get(name) for name in names) for row in read_metrics(folder / "metrics.jsonl")
    ]


def command(recipe: Path, out: Path) -> list[str]:
    return [sys.executable, "-m", "tokenformer", "train", str(recipe), "--out", str(out)]


def test_a_run_learns_reports_and_exports(tmp_path: Path, capsys: Any) -> None:
    recipe = write_recipe(
        tmp_path / "r.yaml",
        model={"options": MODEL},
        augmentation={"randaugment": 0, "mixup": 0, "cutmix": 0},
        run={"steps": 150, "batch_size": 32, "micro_batch_size": 32, "validation_sequences": 180,
             "validate_every": 50, "checkpoint_every": 150, "ema": None},
    )  # fmt: skip
    out = tmp_path / "run"
    main(["train", str(recipe), "--out", str(out)])
    printed = capsys.readouterr().out
    assert "1,617 images to train on" in printed
    assert "images/s" in printed
    assert "right" in printed
    rows = read_metrics(out / "metrics.jsonl")
    assert rows[-1]["tokens"] == 150 * 32
    assert rows[-1]["val_accuracy"] > 0.3  # of ten classes
    model = AutoModelForImageClassification.from_pretrained(out / "model")
    assert model.config.id2label[7] == "7"
    processor = AutoImageProcessor.from_pretrained(out / "model")
    from tokenformer.data.image_sources import load_test_images
    from tokenformer.evaluate.classification import measure_accuracy

    found = measure_accuracy(model.eval(), processor, load_test_images("digits")[0])
    assert found.top_1 == pytest.approx(rows[-1]["val_accuracy"])
    assert found.loss == pytest.approx(rows[-1]["val_loss"], rel=1e-4)


@pytest.mark.slow
def test_a_killed_run_ends_as_an_unbroken_one(tmp_path: Path) -> None:
    """Augmentation, drop path and average included, to the last bit."""
    recipe = write_recipe(tmp_path / "r.yaml")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(command(recipe, whole), check=True, env=environment)
    with started(command(recipe, broken), env=environment, stdout=subprocess.DEVNULL) as process:
        wait_until((broken / "checkpoints" / "step-00000010").exists, process)
    assert len(read_metrics(broken / "metrics.jsonl")) >= 10
    for name in ("step-00000015", "step-00000020"):  # in case it was faster than the signal
        shutil.rmtree(broken / "checkpoints" / name, ignore_errors=True)
    run(command(recipe, broken), check=True, env=environment)
    assert losses(broken) == losses(whole)
    assert len(losses(whole)) == 20


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_give_the_losses_of_one(tmp_path: Path, parallel: str) -> None:
    recipe = write_recipe(tmp_path / "r.yaml", model={"options": MODEL})  # without drop path
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run(command(recipe, tmp_path / "one"), check=True, env=environment)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    rest = command(recipe, tmp_path / "two")[1:]
    run([*launcher, "--standalone", *rest, "--run.parallel", parallel], check=True, env=environment)
    for ours, theirs in zip(losses(tmp_path / "two"), losses(tmp_path / "one"), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


def test_stages_grow_the_model_at_the_seam(tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path / "r.yaml",
        run={"ema": None, "validate_every": 1},
        stages=[
            {"steps": 6},
            {"steps": 4, "grow": {"sizes": {"qkv_tokens": 24, "ffn_tokens": 64}},
             "learning_rate": 1e-9, "schedule": {"kind": "constant", "warmup_steps": 0}},
        ],
    )  # fmt: skip
    out = tmp_path / "run"
    main(["train", str(recipe), "--out", str(out)])
    rows = read_metrics(out / "metrics.jsonl")
    assert rows[6]["val_loss"] == pytest.approx(rows[5]["val_loss"], abs=1e-5)
    assert json.loads((out / "growth-2.json").read_text())["max_layer_change"] < 1e-5
    model = AutoModelForImageClassification.from_pretrained(out / "model")
    assert model.config.ffn_tokens == 64
    main(["grow", str(out), "--ffn_tokens", "80", "--out", str(tmp_path / "larger")])
    assert (tmp_path / "larger" / "preprocessor_config.json").exists()


def test_a_broken_image_stops_the_run_by_name(tmp_path: Path, capsys: Any) -> None:
    for name, shade in (("dark", 20), ("light", 230)):
        for split in ("train", "val"):
            home = tmp_path / "data" / split / name
            home.mkdir(parents=True)
            for number in range(4):
                Image.fromarray(np.full((8, 8), shade, np.uint8)).save(home / f"{number}.png")
    (tmp_path / "data" / "train" / "light" / "2.png").write_bytes(b"\x89PNG broken")
    recipe = write_recipe(
        tmp_path / "r.yaml",
        data={"images": str(tmp_path / "data")},
        run={"steps": 3, "validate_every": 3, "checkpoint_every": 3},
    )
    with pytest.raises(SystemExit) as end:
        main(["train", str(recipe), "--out", str(tmp_path / "refused")])
    assert end.value.code == 2
    assert "2.png cannot be read as an image" in capsys.readouterr().err
    skip = ["--data.on_corrupt", "skip", "--data.workers", "2"]
    main(["train", str(recipe), "--out", str(tmp_path / "skipped"), *skip])
    assert read_metrics(tmp_path / "skipped" / "metrics.jsonl")[-1]["val_accuracy"] >= 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data.images", "nowhere/at/all"], "data.images: no nowhere/at/all"),
        (["--data.corpus", "x"], "cannot both be trained on"),
        (["--model.options.patch_size", "3"], "image_size=8 must be a multiple of patch_size=3"),
        (["--augmentation.mixup", "-1"], "mixup=-1.0 must not be negative"),
        (["--model.options.num_labels", "12"], "num_labels=12, but the images have 10 classes"),
        (["--model.options.num_classes", "3"], "num_classes=3, but the images have 10 classes"),
        (["--data.crop_share", "2"], "crop_share=2.0 must be above 0 and at most 1"),
    ],
)
def test_bad_options_are_one_line(tmp_path: Path, capsys: Any, options: Any, message: str) -> None:
    recipe = write_recipe(tmp_path / "r.yaml")
    with pytest.raises(SystemExit) as end:
        main(["train", str(recipe), "--out", str(tmp_path / "run"), *options])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_a_run_goes_on_only_with_its_own_augmentation(tmp_path: Path, capsys: Any) -> None:
    recipe = write_recipe(tmp_path / "r.yaml", run={"steps": 2, "validate_every": 2})
    out = str(tmp_path / "run")
    main(["train", str(recipe), "--out", out])
    with pytest.raises(SystemExit):
        main(["train", str(recipe), "--out", out, "--augmentation.mixup", "0.5"])
    assert (
        "not trained with these options: augmentation.mixup 0.2 -> 0.5" in capsys.readouterr().err
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tokenformer-base-match", "transformer-base"])
def test_an_imagenet_recipe_takes_a_dry_step(tmp_path: Path, name: str) -> None:
    """At paper scale, on synthetic 224 x 224 images of 1000 classes, but for the batch."""
    random = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in range(1000):
            home = tmp_path / "data" / split / f"n{label:04}"
            home.mkdir(parents=True)
            pixels = random.integers(256, size=(8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((240, 230)).save(home / "x.JPEG")
    recipe = Path(__file__).parent.parent.parent / "recipes" / "vision" / f"{name}.yaml"
    out = tmp_path / "run"
    small = ["--run.batch_size", "4", "--run.micro_batch_size", "2", "--run.compile", "false",
             "--run.precision", "fp32", "--run.validation_sequences", "4"]  # fmt: skip
    images = ["--data.images", str(tmp_path / "data")]
    main(["train", str(recipe), "--out", str(out), "--max_steps", "1", *small, *images])
    row = read_metrics(out / "metrics.jsonl")[-1]
    assert row["loss"] == pytest.approx(np.log(1000), rel=0.1)
    model = AutoModelForImageClassification.from_pretrained(out / "model")
    assert model.num_parameters() == 86_447_848
    assert torch.isfinite(model.classifier.weight).all()


def test_images_without_validation(tmp_path: Path, capsys: Any) -> None:
    recipe = write_recipe(
        tmp_path / "r.yaml",
        data={"images": "digits", "held_out_share": 0},
        run={"steps": 2, "validate_every": 0, "ema": None},
    )
    main(["train", str(recipe), "--out", str(tmp_path / "run")])
    assert "1,797 images to train on" in capsys.readouterr().out
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert not any("val_loss" in row for row in rows)
    assert (tmp_path / "run" / "loss.png").exists()
