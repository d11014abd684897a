"""Reading untrusted pickles: tensors are read, code is not run, other files are refused."""

import json
import pickle
import zipfile
from pathlib import Path

import pytest
import torch

from tests.support.conversion import CodeOnUnpickle
from tokenformer.convert.state_dict import read_state_dict
from tokenformer.errors import ConversionError


@pytest.mark.parametrize("kind", ["zip", "old", "bare"])
def test_a_pickle_that_would_run_code_is_refused(tmp_path, kind):
    file, mark = tmp_path / "pytorch_model.bin", tmp_path / "it-ran"
    content = {"sequential.0.word_embeddings.weight": torch.ones(2, 2), "x": CodeOnUnpickle(mark)}
    if kind == "bare":
        file.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, file, _use_new_zipfile_serialization=kind == "zip")
    with pytest.raises(ConversionError, match=r"could run (any )?code") as refusal:
        read_state_dict(file)
    assert "\n" not in str(refusal.value)
    assert kind == "bare" or "posix.symlink" in str(refusal.value)
    assert not mark.is_symlink()
    torch.load(file, weights_only=False) if kind != "bare" else pickle.loads(file.read_bytes())
    assert mark.is_symlink(), "the trap is real"


def torn(path: Path) -> None:
    torch.save({"a": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:2500])


def torn_old(path: Path) -> None:
    torch.save({"a": torch.ones(1000)}, path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes()[:2500])


def other_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "text")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (torn, "is truncated or not a checkpoint"),
        (torn_old, "is truncated or not a checkpoint"),
        (other_zip, "is truncated or not a checkpoint"),
        (lambda path: path.write_bytes(b""), "is truncated or not a checkpoint"),
        (lambda path: path.write_text("text"), "is truncated or not a checkpoint"),
        (lambda path: torch.save(torch.nn.Linear(2, 2), path), "it contains torch.nn"),
        (lambda path: torch.save([1, 2], path), "holds a list, not a state dict"),
        (lambda path: torch.save(torch.ones(2), path), "holds a Tensor, not a state dict"),
        (lambda path: torch.save({}, path), "holds nothing, not a state dict"),
        (lambda path: torch.save({3: torch.ones(2)}, path), r"tensors by name: 3 \(Tensor\)$"),
        (
            lambda path: torch.save({"module": {"a": torch.ones(2)}, "iteration": 3}, path),
            r"more than a state dict of tensors by name: module \(dict\), iteration \(int\)$",
        ),
    ],
    ids=[
        "torn",
        "torn old",
        "zip",
        "empty",
        "text",
        "module",
        "list",
        "tensor",
        "no",
        "3",
        "nested",
    ],
)
def test_what_is_no_state_dict_is_told_in_a_line(tmp_path, make, message):
    make(tmp_path / "file.bin")
    with pytest.raises(ConversionError, match=message) as refusal:
        read_state_dict(tmp_path / "file.bin")
    assert str(refusal.value).startswith(str(tmp_path / "file.bin"))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "../secret.bin"}}, "names a file outside the folder: ../secret.bin"),
        ({"weight_map": {"a": "part.bin"}}, "names part.bin, which is missing"),
        ({"weight_map": 3}, "is not the index of a sharded model"),
        ([], "is not the index of a sharded model"),
    ],
)
def test_an_index_that_leads_nowhere_is_told(tmp_path, index, message):
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(ConversionError, match=message):
        read_state_dict(tmp_path)


def test_tensors_stay_on_the_disk_until_they_are_used(tmp_path):
    file = tmp_path / "model.bin"
    torch.save({"a": torch.zeros(1 << 20)}, file)
    tensor = read_state_dict(file)["a"]
    content = file.read_bytes()
    with file.open("r+b") as opened:  # the map shows what is in the file now
        opened.seek(content.index(bytes(1 << 22)))
        opened.write(torch.full((1 << 20,), 7.0).numpy().tobytes())
    assert tensor.eq(7).all()
