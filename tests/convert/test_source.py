"""Finding the kind of a source from its files; DeepSpeed shards are refused with a hint."""

import json

import pytest

from tokenformer.convert.source import find_source
from tokenformer.errors import ConversionError


def make(folder, *names, **documents):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    for name, content in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


@pytest.mark.parametrize(
    ("names", "documents", "kind"),
    [
        (["pytorch_model.bin"], {}, "released"),
        (["pytorch_model.bin"], {"config": {"num_layers": 3}}, "released"),
        (["pytorch_model.bin.index.json"], {}, "released"),
        (["model.safetensors"], {"config": {"model_type": "tokenformer"}}, "tokenformer"),
        (["pytorch_model.bin"], {"config": {"model_type": "gpt2"}}, "gpt2"),
        (["shard-00001-model-00001-of-00001.safetensors"], {"manifest": {}}, "checkpoint"),
    ],
)
def test_kinds_of_folders(tmp_path, names, documents, kind):
    source = find_source(make(tmp_path, *names, **documents))
    assert (source.kind, source.path, source.folder) == (kind, tmp_path, tmp_path)


def test_a_run_is_its_model_and_a_file_has_a_folder(tmp_path):
    make(tmp_path / "run" / "model", "model.safetensors", config={"model_type": "tokenformer"})
    source = find_source(str(tmp_path / "run"))
    assert (source.kind, source.path) == ("tokenformer", tmp_path / "run" / "model")
    make(tmp_path, "any-name.pt")
    source = find_source(str(tmp_path / "any-name.pt"))
    assert (source.kind, source.folder) == ("released", tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", "no model in .*: neither a pytorch_model.bin, nor"),
        ("absent.bin", "absent.bin does not exist"),
        ("listed", "config.json is not a JSON object"),
        ("broken", "config.json cannot be read"),
    ],
)
def test_what_holds_no_model_is_told(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "listed", "broken"):
        (tmp_path / folder).mkdir()
    make(tmp_path / "listed", config=[])
    (tmp_path / "broken" / "config.json").write_text("{")
    with pytest.raises(ConversionError, match=message):
        find_source(name)


PIECES = [
    ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"],
    ["layer_00-model_00-model_states.pt", "layer_02-model_00-model_states.pt"],
    ["zero_pp_rank_0_mp_rank_00_model_states.pt"],
]


@pytest.mark.parametrize("pieces", PIECES, ids=lambda pieces: pieces[0])
def test_deepspeed_pieces_are_refused_with_the_command_that_joins_them(tmp_path, pieces):
    top = tmp_path / "checkpoints"
    make(top, *(f"global_step500/{name}" for name in pieces))
    (top / "latest").write_text("global_step500\n")
    command = "python -m deepspeed.utils.zero_to_fp32"
    with pytest.raises(ConversionError) as refusal:
        find_source(str(top))
    assert f"`{command} {top} JOINED` and convert JOINED" in str(refusal.value)
    for inside in (top / "global_step500", top / "global_step500" / pieces[0]):
        with pytest.raises(ConversionError) as refusal:
            find_source(str(inside))
        assert f"`{command} {top} JOINED --tag global_step500`" in str(refusal.value)
        assert pieces[0] in str(refusal.value)


def test_joined_weights_beside_the_pieces_are_taken(tmp_path):
    make(tmp_path, "pytorch_model.bin", "latest", *PIECES[0])
    assert find_source(str(tmp_path)).kind == "released"
    make(tmp_path, config={"model_type": "gpt2"})
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "model.safetensors")
    assert find_source(str(tmp_path)).kind == "gpt2"


def test_a_file_named_latest_is_not_followed_outside(tmp_path):
    make(tmp_path / "elsewhere", *PIECES[0])
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "latest").write_text("../elsewhere")
    with pytest.raises(ConversionError, match="no model in"):
        find_source(str(tmp_path / "here"))
