"""Runs on images with text: the same loop, checkpoints, resume and ranks as for text."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

import tokenformer
from tests.support.image_text import make_halves, make_joint
from tests.support.processes import run, started, wait_until
from tests.support.training import command, two_ranks
from tokenformer.cli import main
from tokenformer.data.byte_tokenizer import byte_tokenizer
from tokenformer.train.metrics import read_metrics
from tokenformer.train.row_rates import row_rates

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

ALIGNMENT = {"rates": {"*": 0, "*_tokens": 1}, "part_rates": {"vision": 0, "language": 0}}
"""Trains only the new tokens."""


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


def test_a_resumed_run_ends_as_an_unbroken_one(
    halves: list[str], write_recipe: Any, tmp_path: Path
) -> None:
    """And does not need the joint model that it started from, nor its processor."""
    joint, whole, broken = (tmp_path / name for name in ("joint", "whole", "broken"))
    main(["join", *halves, "--new_tokens", "7", "--out", str(joint)])
    recipe = write_recipe(model={"options": {}, "start_from": str(joint)}, optimizer=ALIGNMENT)
    main(["train", str(recipe), "--out", str(whole)])
    shutil.copytree(whole, broken)
    shutil.rmtree(broken / "checkpoints" / "step-00000006")
    shutil.rmtree(broken / "model")
    shutil.rmtree(joint)
    main(["train", str(recipe), "--out", str(broken)])
    assert losses(broken) == losses(whole)
    assert_equal_models(broken, whole)


def test_a_checkpoint_grows_by_new_tokens(write_recipe: Any, tmp_path: Path) -> None:
    recipe = write_recipe(run={"steps": 6, "ema": None})
    whole, grown = tmp_path / "whole", tmp_path / "grown"
    main(["train", str(recipe), "--out", str(whole)])
    start = whole / "checkpoints" / "step-00000003"
    main(["grow", str(start), "--new_tokens", "12", "--out", str(grown)])
    main(["train", str(recipe), "--out", str(grown)])
    model = AutoModelForImageTextToText.from_pretrained(grown / "model")
    assert model.config.new_tokens == 12
    assert AutoProcessor.from_pretrained(grown / "model").image_token_id == 257
    # The first step starts from the same function.
    ours, theirs = (losses(folder) for folder in (grown, whole))
    assert [row[0] for row in ours] == [4, 5, 6]
    assert ours[0][1] == pytest.approx(theirs[3][1], rel=1e-5)


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit(colors: Path, write_recipe: Any, tmp_path: Path) -> None:
    """SIGKILL, once before the first checkpoint and once after it; also at an image that is
    skipped, and with threads that read ahead."""
    data = shutil.copytree(colors, tmp_path / "data")
    (data / "train-red-3.png").write_bytes(b"broken")
    recipe = write_recipe(
        data={"length": 16, "image_text": str(data), "on_corrupt": "skip", "workers": 2},
        run={"steps": 60, "checkpoint_every": 15, "validate_every": 20},
    )
    whole, out = tmp_path / "whole", tmp_path / "killed"
    main(["train", str(recipe), "--out", str(whole)])
    train = command(recipe, out)
    for step in (5, 40):
        with started(train) as process:
            assert wait_until(lambda step=step: last_step(out) >= step, process)
            process.send_signal(signal.SIGKILL)
            process.wait(60)
        assert last_step(out) < 60
    done = run(train)
    assert done.returncode == 0, done.stderr
    assert "Resuming from step" in done.stdout
    assert losses(out) == losses(whole)
    assert_equal_models(out, whole)


def last_step(out: Path) -> int:
    rows = losses(out) if (out / "metrics.jsonl").exists() else []
    return max((step for step, *_ in rows), default=-1)


def assert_equal_models(one: Path, other: Path) -> None:
    """Files, with those of the processor, but for the card, which names the run."""
    names = {path.name for path in (one / "model").iterdir()} - {"README.md"}
    assert {"model.safetensors", "tokenizer.json", "processor_config.json"} <= names
    for name in names:
        assert (one / "model" / name).read_bytes() == (other / "model" / name).read_bytes(), name


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
@pytest.mark.parametrize("start", ["fresh", "routed", "projector"])
def test_two_ranks_give_the_losses_of_one(
    start: str, parallel: str, halves: list[str], write_recipe: Any, tmp_path: Path
) -> None:
    """Also with batches on a rank that have no image, whose embedding then gets no gradient, with
    only the new tokens trained, and with a frozen encoder."""
    changes: dict[str, Any] = {}
    if start != "fresh":
        out = ["--new_tokens", "7", "--out", str(tmp_path / "joint")]
        main(["join", *halves, "--mode", start, *out])
        changes = {"model": {"options": {}, "start_from": str(tmp_path / "joint")}}
    if start == "routed":
        changes["optimizer"] = ALIGNMENT
    recipe = write_recipe(**changes)
    main(["train", str(recipe), "--out", str(tmp_path / "one")])
    done = two_ranks(recipe, tmp_path / "two", parallel)
    assert done.returncode == 0, done.stderr
    for ours, theirs in zip(losses(tmp_path / "two"), losses(tmp_path / "one"), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    if start != "routed":
        return
    before = load_file(tmp_path / "joint" / "model.safetensors")
    after = load_file(tmp_path / "two" / "model" / "model.safetensors")
    vision = 20  # of each of q, k and v
    for rows in (slice(0, vision), slice(vision + 7, None)):
        name = "model.layers.0.attention.q.key_tokens"
        assert torch.equal(before[name][rows], after[name][rows])


def test_alignment_trains_only_the_new_tokens(
    halves: list[str], write_recipe: Any, tmp_path: Path, capsys: Any
) -> None:
    joint = tmp_path / "joint"
    main(["join", *halves, "--new_tokens", "7", "--out", str(joint)])
    start, given = ["--model.start_from", str(joint)], {"ema": None, "steps": 1}
    high = "is meant for fresh weights"
    for rates, warns in ((ALIGNMENT, False), (ALIGNMENT | {"part_rates": {"vision": 0}}, True)):
        fresh = write_recipe(model={"options": {}}, optimizer=rates, run=given)
        main(["train", str(fresh), *start, "--out", str(tmp_path / f"warns-{warns}")])
        assert (high in capsys.readouterr().out) == warns
    recipe = write_recipe(
        model={"options": {}, "start_from": str(joint)},
        optimizer=ALIGNMENT,
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
    exported = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert exported["token_rates"] is None  # the rates of a recipe are those of its run
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


def test_rates_of_the_model_and_of_its_parts_multiply() -> None:
    model = make_joint(language_rate=0.5)
    place = ("q", 0)  # 20 vision tokens, 7 new and 24 of language
    assert row_rates(model.config, place, {}) == [1.0] * 27 + [0.5] * 24
    found = row_rates(model.config, place, {"vision": 0.0, "language": 0.5})
    assert found == [0.0] * 20 + [1.0] * 7 + [0.25] * 24
    grown, _ = tokenformer.grow(model, new_tokens=9, old_rate=0)
    assert row_rates(grown.config, place, {}) == [0.0] * 27 + [1.0] * 2 + [0.0] * 24
    assert make_joint(language_rate=1).config.token_rates is None


def test_the_encoder_of_a_projector_stays_frozen(
    halves: list[str], write_recipe: Any, tmp_path: Path, capsys: Any
) -> None:
    joint = tmp_path / "joint"
    main(["join", *halves, "--mode", "projector", "--out", str(joint)])
    recipe = write_recipe(
        model={"options": {}, "start_from": str(joint)},
        optimizer={"rates": {"model.images.encoder.*": 0}},
        run={"ema": None, "steps": 4},
    )
    main(["train", str(recipe), "--out", str(tmp_path / "run")])
    options = ["--optimizer.part_rates", "{language: 0}"]
    with pytest.raises(SystemExit):
        main(["train", str(recipe), "--out", str(tmp_path / "refused"), *options])
    assert "a model of mode projector has one set of tokens" in capsys.readouterr().err
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


@pytest.mark.parametrize(("half", "kind"), [(0, "an image classifier"), (1, "a language model")])
@pytest.mark.parametrize("dry", [[], ["--dry_run"]])
def test_a_start_from_another_kind_of_model_is_named(
    half: int, kind: str, dry: list[str], halves: list[str], write_recipe: Any, capsys: Any
) -> None:
    start = ["--model.start_from", halves[half], *dry]
    with pytest.raises(SystemExit) as end:
        main(["train", str(write_recipe(model={"options": {}})), *start])
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert f"is {kind}, not a vision-language model; make one with `tokenformer join`" in message


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
