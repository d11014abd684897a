"""Growth from folder to folder: the files that growing in memory and saving would write."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import tokenformer
from tests.support.growth import logits, trained_tokenformer
from tokenformer.growth.model_folder import grow_folder
from tokenformer.models import weight_writer
from tokenformer.models.checksums import verify_weights
from tokenformer.models.weight_files import weight_files

SIZES = {"qkv_tokens": 90, "output_tokens": 81, "ffn_tokens": 360}
NORM = "model.norm.weight"
SAME = ("config.json", "generation_config.json", "checksums.json", "model.safetensors")


@pytest.fixture
def model(make_config):
    return trained_tokenformer(make_config)[0]


@pytest.fixture
def folder(model, tmp_path):
    model.save_pretrained(tmp_path / "small")
    return tmp_path / "small"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("init", ["zero", "clone", "zero_value"])
def test_the_files_are_those_of_growth_in_memory(model, tmp_path, init, dtype):
    model.to(dtype).save_pretrained(tmp_path / "small")
    grown, report = tokenformer.grow(model, init=init, seed=3, **SIZES)
    grown.save_pretrained(tmp_path / "memory")
    on_disk = grow_folder(tmp_path / "small", tmp_path / "disk", init=init, seed=3, **SIZES)
    for name in SAME:
        one, two = ((tmp_path / where / name).read_bytes() for where in ("memory", "disk"))
        assert one == two, name
    assert sorted(map(str, on_disk.parts)) == sorted(map(str, report.parts))


def test_a_scale_that_becomes_a_parameter(model, folder, tmp_path):
    grow_folder(folder, tmp_path / "disk", scale="learned", **SIZES)
    grown = tokenformer.TokenformerForCausalLM.from_pretrained(tmp_path / "disk").eval()
    assert grown.model.layers[0].ffn.scale_tokens.item() == 96
    assert torch.allclose(logits(grown), logits(model), atol=1e-5)


@pytest.mark.parametrize("init", ["zero", "zero_value"])
def test_threads_do_not_change_the_weights(folder, tmp_path, init):
    before = torch.get_num_threads()
    hashes = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            out = tmp_path / str(threads)
            grow_folder(folder, out, init=init, **SIZES)
            hashes.append((out / "checksums.json").read_text())
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert hashes[0] == hashes[1]


def test_shards(model, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(weight_writer, "MAX_SHARD_SIZE", "20KB")
    grow_folder(folder, tmp_path / "disk", **SIZES)
    files = weight_files(tmp_path / "disk")
    assert len(files) > 5
    verify_weights(tmp_path / "disk", files)
    grown, _ = tokenformer.grow(model, **SIZES)
    grown.save_pretrained(tmp_path / "memory", max_shard_size="20KB")
    for file in files:
        assert file.read_bytes() == (tmp_path / "memory" / file.name).read_bytes()
    index = "model.safetensors.index.json"
    assert (tmp_path / "disk" / index).read_text() == (tmp_path / "memory" / index).read_text()


def test_an_earlier_save_is_replaced(model, folder, tmp_path):
    out = tmp_path / "disk"
    model.save_pretrained(out, max_shard_size="20KB")
    assert len(weight_files(out)) > 5
    grow_folder(folder, out, **SIZES)
    assert [file.name for file in out.glob("*.safetensors*")] == ["model.safetensors"]
    grown = tokenformer.TokenformerForCausalLM.from_pretrained(out).eval()
    assert torch.allclose(logits(grown), logits(model), atol=1e-5)


def test_zero_keys_are_holes(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(weight_writer, "BLOCK", 1 << 12)
    report = grow_folder(folder, tmp_path / "disk", ffn_tokens=10_000)
    file = tmp_path / "disk" / "model.safetensors"
    keys = load_file(file)["model.layers.1.ffn.key_tokens"]
    assert keys[:96].abs().min() > 0
    assert keys[96:].count_nonzero() == 0
    verify_weights(tmp_path / "disk", [file])
    assert file.stat().st_size > 4 * report.parameters_after
    if file.stat().st_blocks:  # not every file system has holes
        assert 512 * file.stat().st_blocks < 0.6 * file.stat().st_size


def test_what_fails_leaves_the_old_weights(folder, tmp_path, monkeypatch):
    out = tmp_path / "disk"
    grow_folder(folder, out, **SIZES)
    names = sorted(path.name for path in out.iterdir())
    before = (out / "model.safetensors").read_bytes()
    calls = []

    def fail(stream, data):
        calls.append(len(data))
        if len(calls) == 9:
            raise OSError(28, "No space left on device")
        stream.write(data)

    monkeypatch.setattr(weight_writer, "write_sparse", fail)
    with pytest.raises(OSError, match="No space left"):
        grow_folder(folder, out, init="clone", **SIZES)
    assert sorted(path.name for path in out.iterdir()) == names
    assert (out / "model.safetensors").read_bytes() == before


def test_mixed_dtypes(folder, tmp_path):
    change_weights(folder, lambda tensors: {**tensors, NORM: tensors[NORM].bfloat16()})
    grow_folder(folder, tmp_path / "disk", **SIZES)
    stored = load_file(tmp_path / "disk" / "model.safetensors")
    assert torch.equal(stored[NORM], load_file(folder / "model.safetensors")[NORM])
    assert {tensor.dtype for name, tensor in stored.items() if name != NORM} == {torch.float32}


def test_unknown_tensors_are_refused(folder, tmp_path):
    change_weights(folder, lambda tensors: {**tensors, "bias": torch.zeros(1)})
    with pytest.raises(ValueError, match="the model has no parameter bias"):
        grow_folder(folder, tmp_path / "disk", **SIZES)


def change_weights(folder, change):
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    (folder / "checksums.json").unlink()
