"""Damaged, hostile or inconsistent model folders give a one-line error."""

import json
import os
import pickle
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import tokenformer
from tokenformer.cli import main
from tokenformer.data.byte_tokenizer import VOCAB_SIZE, byte_tokenizer
from tokenformer.models.checksums import CHECKSUMS, VERIFIED, write_checksums
from tokenformer.models.loading import (
    ModelFolderError,
    load_config,
    load_pretrained,
    load_tokenformer,
)

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a tokenizer, in one file and in shards, and in int8."""
    torch.manual_seed(0)
    config = tokenformer.TokenformerConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        qkv_tokens=24,
        output_tokens=20,
        ffn_tokens=44,
    )
    model = tokenformer.TokenformerForCausalLM(config)
    shelf = tmp_path_factory.mktemp("shelf")
    model.save_pretrained(shelf / "whole")
    model.save_pretrained(shelf / "shards", max_shard_size="40KB")
    rounded = tokenformer.TokenformerForCausalLM.from_pretrained(
        shelf / "whole", quantization_config=tokenformer.TokenQuantization()
    )
    rounded.save_pretrained(shelf / "int8")
    for folder in shelf.iterdir():
        byte_tokenizer().save_pretrained(folder)
    return shelf


@pytest.fixture
def folder(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder to spoil, and an empty cache of verified files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(shelf / "whole", tmp_path / "copied"))


def edit(file: Path, **changes: Any) -> None:
    document = json.loads(file.read_text())
    file.write_text(json.dumps({**document, **changes}))


def replace(folder: Path, tensor: torch.Tensor, *, checksums: bool = True) -> None:
    """Give the final norm other weights, as something that knows no checksums would."""
    tensors = {**load_file(folder / WEIGHTS), NORM: tensor}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    if checksums:
        write_checksums(folder)


def weights(index: int, value: float) -> torch.Tensor:
    made = torch.ones(32)
    made[index] = value
    return made


def flip(folder: Path) -> None:
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[-5] ^= 1
    (folder / WEIGHTS).write_bytes(data)


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": print}))


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", **changes)


SPOILERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "NaN": (lambda f: replace(f, weights(7, float("nan"))), f"{NORM} has NaN or infinite weights"),
    "inf": (lambda f: replace(f, weights(0, -float("inf"))), f"{NORM} has NaN or infinite weights"),
    "int32": (
        lambda f: replace(f, torch.ones(32, dtype=torch.int32)),
        f"wrong dtype of {NORM} int32",
    ),
    "a flipped bit": (flip, f"{WEIGHTS} was changed or damaged, its SHA-256 differs"),
    "a shape": (lambda f: replace(f, torch.ones(31)), f"{NORM} [31] instead of [32]"),
    "too short": (
        lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-100]),
        f"{WEIGHTS} is damaged",
    ),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), f"{WEIGHTS} is missing"),
    "checksums": (lambda f: (f / CHECKSUMS).write_text("{}"), f"{CHECKSUMS} is damaged"),
    "a pickle": (pickled, "pytorch_model.bin is a pickle"),
    "null": (
        lambda f: (f / "config.json").write_text("null"),
        "config.json must hold a JSON object, not null",
    ),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json is not valid JSON"),
    "no width": (config(hidden_size=None), "config.json: hidden_size=None must be a whole number"),
    "a dtype": (config(dtype="float23"), "config.json: dtype='float23' is not a torch dtype"),
    "tokens": (config(ffn_tokens="many"), "ffn_tokens='many' must be a whole number"),
    "other weights": (
        config(transformers_weights="../model.safetensors"),
        "names a file outside the folder",
    ),
    "a quantizer": (
        config(quantization_config={"quant_method": "awq", "bits": 4}),
        "cannot be loaded: ",
    ),
    "generation": (
        lambda f: (f / "generation_config.json").write_text('{"max_length"'),
        "generation_config.json is not valid JSON",
    ),
    "generation values": (
        lambda f: edit(f / "generation_config.json", cache_implementation=3),
        "generation_config.json is not valid",
    ),
}


@pytest.mark.parametrize("spoiler", SPOILERS)
def test_a_spoiled_folder_is_refused_in_a_line(folder: Path, spoiler: str) -> None:
    spoil, message = SPOILERS[spoiler]
    spoil(folder)
    with pytest.raises(ModelFolderError) as error:
        load_pretrained(AutoModelForCausalLM, str(folder))
    assert message in str(error.value)
    assert str(error.value).startswith(f"{folder} cannot be loaded: ")
    assert len(str(error.value).splitlines()) == 1


COMMANDS = {
    "generate": ["generate", "copied", "--prompt", "a"],
    "grow": ["grow", "copied", "--ffn_tokens", "64", "--out", "new"],
    "prune": ["prune", "copied", "--out", "new"],
    "merge": ["merge", "copied", "copied", "--out", "new"],
    "convert": ["convert", "copied", "--to", "released", "--out", "new"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_refuse_spoiled_folders(
    folder: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for spoiler in ("NaN", "a flipped bit", "a shape", "a pickle", "no width", "a dtype"):
        shutil.copytree(folder, "whole")
        spoil, message = SPOILERS[spoiler]
        spoil(folder)
        with pytest.raises(SystemExit) as end:
            main(COMMANDS[command])
        error_output = capsys.readouterr().err
        assert end.value.code == 2, error_output
        assert message in error_output
        assert len(error_output.splitlines()) == 1
        assert not Path("new").exists()
        shutil.rmtree(folder)
        Path("whole").rename(folder)


@pytest.mark.parametrize("command", ["grow", "prune", "merge", "convert"])
def test_no_verify_takes_the_weights_as_they_are(folder: Path, command: str) -> None:
    flip(folder)
    main([*COMMANDS[command], "--no_verify"])
    assert Path("new/config.json").exists()


def test_grow_refuses_a_target_of_another_kind(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {"vocab_size": 9, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    other = tokenformer.TransformerForCausalLM(tokenformer.TransformerConfig(**shape))
    other.save_pretrained("other")
    with pytest.raises(SystemExit):
        main(["grow", "copied", "--to", "other", "--out", "new"])
    error_output = capsys.readouterr().err.splitlines()
    assert error_output[-1].endswith("other is a tokenformer_transformer model, not a tokenformer")


@pytest.mark.parametrize(
    "sizes", [{"hidden_size": 1 << 20}, {"vocab_size": 1 << 40}, {"num_hidden_layers": 10**9}]
)
def test_a_configuration_larger_than_its_weights_allocates_nothing(
    folder: Path, sizes: dict[str, int]
) -> None:
    edit(folder / "config.json", **sizes)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(ModelFolderError, match=r"wrong shape of|more than the weights"):
        load_pretrained(AutoModelForCausalLM, str(folder))
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert kilobytes < 200_000
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("name", ["whole", "shards", "int8"])
def test_sound_folders_load(shelf: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(shelf / "cache"))
    assert load_tokenformer(shelf / name).config.hidden_size == 32
    listed = json.loads((shelf / name / CHECKSUMS).read_text())["files"]
    assert set(listed) == {file.name for file in (shelf / name).glob("*.safetensors")}


def test_a_file_is_read_once(folder: Path, tmp_path: Path) -> None:
    """A change that leaves size and time alone passes, which shows that nothing was read."""
    load_tokenformer(folder)
    status = (folder / WEIGHTS).stat()
    flip(folder)
    os.utime(folder / WEIGHTS, ns=(status.st_atime_ns, status.st_mtime_ns))
    load_tokenformer(folder)
    os.utime(folder / WEIGHTS, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(ModelFolderError, match="SHA-256 differs"):
        load_tokenformer(folder)
    cache = tmp_path / "cache" / "tokenformer"
    cache.joinpath(VERIFIED).write_text("[torn")
    with pytest.raises(ModelFolderError, match="SHA-256 differs"):
        load_tokenformer(folder)
    load_tokenformer(folder, verify=False)


def test_a_cache_that_cannot_be_written_is_done_without(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    load_tokenformer(folder)
    load_tokenformer(folder)
    assert (tmp_path / "cache").is_file()


def test_older_folders_load_and_save_again(folder: Path) -> None:
    """Without checksums, or with stale ones of other files; saving rewrites them."""
    (folder / CHECKSUMS).unlink()
    model = load_tokenformer(folder)
    edited = {"format": 1, "files": {"model-00001-of-00002.safetensors": {"size": 1, "sha256": ""}}}
    (folder / CHECKSUMS).write_text(json.dumps(edited))
    load_tokenformer(folder)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    model.save_pretrained(folder)
    assert torch.equal(load_tokenformer(folder).model.norm.weight, model.model.norm.weight)
    model.save_pretrained(folder, max_shard_size="40KB")
    assert not (folder / WEIGHTS).exists()
    load_tokenformer(folder)


def outside(folder: Path, name: str) -> None:
    """A shard moved out of the folder, and an index that finds it."""
    shard = sorted(folder.glob("model-*.safetensors"))[0]
    (folder.parent / "stray").mkdir()
    moved = Path(shutil.move(shard, folder.parent / "stray" / shard.name))
    index = json.loads((folder / INDEX).read_text())
    places = {"parent": f"../stray/{shard.name}", "absolute": str(moved), "link": shard.name}
    if name == "link":
        shard.symlink_to(moved)
    renamed = {
        key: places[name] if value == shard.name else value
        for key, value in index["weight_map"].items()
    }
    (folder / INDEX).write_text(json.dumps({**index, "weight_map": renamed}))


@pytest.mark.parametrize("name", ["parent", "absolute", "link"])
def test_an_index_stays_in_its_folder(
    shelf: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(shelf / "shards", tmp_path / "copied"))
    outside(folder, name)
    with pytest.raises(ModelFolderError, match="names a file outside the folder"):
        load_pretrained(AutoModelForCausalLM, str(folder))
    with pytest.raises(SystemExit):
        main(["grow", str(folder), "--ffn_tokens", "64", "--out", str(tmp_path / "new")])
    assert "names a file outside the folder" in capsys.readouterr().err


def test_a_snapshot_of_the_hub_consists_of_links(shelf: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "m" / "blobs", tmp_path / "m" / "snapshots" / "abc"
    shutil.copytree(shelf / "shards", blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / file.name)
    loaded, plain = (load_tokenformer(path).state_dict() for path in (snapshot, blobs))
    assert all(torch.equal(tensor, plain[name]) for name, tensor in loaded.items())


def test_other_libraries_models_keep_their_ways(tmp_path: Path) -> None:
    """Only the location of their files is checked."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2))
    with torch.no_grad():
        model.transformer.ln_f.weight[0] = float("inf")
    model.save_pretrained(tmp_path / "gpt2")
    assert load_pretrained(AutoModelForCausalLM, str(tmp_path / "gpt2")).config.n_embd == 8
    assert load_config(str(tmp_path / "gpt2")).model_type == "gpt2"
    (tmp_path / "gpt2" / WEIGHTS).rename(tmp_path / "model.safetensors")
    names = dict.fromkeys(load_file(tmp_path / WEIGHTS), "../model.safetensors")
    (tmp_path / "gpt2" / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    with pytest.raises(ModelFolderError, match="outside the folder"):
        load_pretrained(AutoModelForCausalLM, str(tmp_path / "gpt2"))
