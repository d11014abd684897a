"""Checkpoints against real files, real processes, real disks."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import nn

from tests.support.processes import LIMIT, run, run_apart, wait_until
from tests.train.checkpoint_worker import UNFINISHED, Filled, make_model, make_optimizer, step_once
from tokenformer import files
from tokenformer.errors import CheckpointError
from tokenformer.train import checkpoint
from tokenformer.train.checkpoint import (
    async_saver,
    directory,
    latest,
    load,
    manifest,
    prune,
    save,
    writer,
)
from tokenformer.train.checkpoint.async_saver import AsyncSaver
from tokenformer.train.export import export

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ROOT = Path(__file__).parent.parent.parent


def trained(steps: int = 2, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = make_model()
    optimizer = make_optimizer(model, **options)
    for step in range(1, steps + 1):
        step_once(model, optimizer, step)
    return model, optimizer


def stored(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint of one rank, by plain safetensors."""
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    return found


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        assert torch.equal(one[name], other[name]), name


def assert_json_same(one: dict[str, str], other: dict[str, str]) -> None:
    sharding = "DCP_SHARDING_INFO"
    assert {**one, sharding: json.loads(one[sharding])} == {
        **other,
        sharding: json.loads(other[sharding]),
    }


class TestRoundTrip:
    @pytest.mark.parametrize("fused", [True, False])
    def test_everything_comes_back_to_the_last_bit(self, tmp_path, fused):
        model, optimizer = trained(fused=fused)
        extra = {"ema": torch.randn(5, 3), "count": torch.tensor(2**40 + 1)}
        state = {"step": 2, "tokens": 96, "schedule": {"name": "cosine", "peak": 0.1 + 0.2}}
        random.gauss(0, 1)
        np.random.standard_normal()
        path = save(tmp_path, model=model, optimizer=optimizer, state=state, extra=extra)
        drawn = [torch.rand(3).tolist(), random.gauss(0, 1), np.random.standard_normal(3).tolist()]

        other = make_model(seed=1)
        other_optimizer = make_optimizer(other, fused=fused)
        found, found_extra = load(path, model=other, optimizer=other_optimizer)
        assert found == state
        again = [torch.rand(3).tolist(), random.gauss(0, 1), np.random.standard_normal(3).tolist()]
        assert again == drawn
        assert_same(found_extra, extra)
        assert_same(other.state_dict(), model.state_dict())
        for mine, theirs in zip(model.named_parameters(), other.named_parameters(), strict=True):
            assert_same(optimizer.state[mine[1]], other_optimizer.state[theirs[1]])
            assert other_optimizer.state[theirs[1]]["step"] == 2
        for mine, theirs in zip(optimizer.param_groups, other_optimizer.param_groups, strict=True):
            assert {**mine, "params": 0} == {**theirs, "params": 0}
            assert theirs["lr"] == 3e-3 / 2

    @pytest.mark.parametrize("fused", [True, False])
    def test_going_on_equals_the_unbroken_run(self, tmp_path, fused):
        model, optimizer = trained(fused=fused)
        path = save(tmp_path, model=model, optimizer=optimizer, state={"step": 2})
        unbroken = [step_once(model, optimizer, step) for step in range(3, 7)]
        other = make_model(seed=1)
        other_optimizer = make_optimizer(other, fused=fused)
        load(path, model=other, optimizer=other_optimizer)
        assert [step_once(other, other_optimizer, step) for step in range(3, 7)] == unbroken
        assert_same(other.state_dict(), model.state_dict())

    def test_going_back_in_the_same_objects(self, tmp_path):
        model, optimizer = make_model(), None
        optimizer = make_optimizer(model)
        before = save(tmp_path, model=model, optimizer=optimizer, state={"step": 0})
        first = [step_once(model, optimizer, step) for step in (1, 2)]
        load(before, model=model, optimizer=optimizer)
        assert not optimizer.state
        assert [step_once(model, optimizer, step) for step in (1, 2)] == first

    def test_a_tied_tensor_is_stored_once(self, tmp_path):
        model, optimizer = trained()
        path = save(tmp_path, model=model, optimizer=optimizer, state={"step": 2})
        assert "model.lm_head.weight" in {f"model.{name}" for name in model.state_dict()}
        names = stored(path).keys()
        assert "model.model.embed_tokens.weight" in names
        assert not [name for name in names if "lm_head" in name]
        untied = make_model(tie_word_embeddings=False)
        with pytest.raises(CheckpointError, match=r"it lacks model\.lm_head\.weight"):
            load(path, model=untied)

    def test_plain_safetensors_reads_it(self, tmp_path):
        model, optimizer = trained()
        tensors = stored(save(tmp_path, model=model, optimizer=optimizer, state={"step": 2}))
        assert torch.equal(tensors["model.model.norm.weight"], model.model.norm.weight)
        moment = optimizer.state[model.model.norm.weight]["exp_avg"]
        assert torch.equal(tensors["optimizer.model.norm.weight.exp_avg"], moment)
        assert torch.equal(tensors["rng.cpu"], torch.get_rng_state()[None])

    def test_nothing_in_it_is_a_pickle(self, tmp_path):
        model, optimizer = trained()
        path = save(tmp_path, model=model, optimizer=optimizer, state={"step": 2})
        kinds = {file.suffix for file in path.iterdir()}
        assert kinds == {".json", ".safetensors"}

    def test_torch_writes_the_same_and_reads_it(self, tmp_path):
        model, optimizer = trained()
        ours = save(tmp_path, model=model, optimizer=optimizer, state={"step": 2})
        tensors = stored(ours)
        theirs = tmp_path / "theirs"
        writer = dcp.HuggingFaceStorageWriter(str(theirs), save_distributed=True)
        dcp.save(tensors, storage_writer=writer, no_dist=True)
        (file,) = theirs.iterdir()
        assert_same(stored(theirs), tensors)
        with safe_open(file, "pt") as one, safe_open(ours / file.name, "pt") as other:
            assert_json_same(one.metadata(), other.metadata())
        empty = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        dcp.load(empty, storage_reader=dcp.HuggingFaceStorageReader(str(ours)), no_dist=True)
        assert_same(empty, tensors)

    def test_transposed_shared_and_empty_tensors(self, tmp_path):
        whole = torch.randn(4, 6)
        extra = {
            "transposed": whole.T,
            "rows": whole[1:3],
            "same": whole.view(-1),
            "empty": torch.empty(0, 3),
            "half": torch.randn(3).half(),
            "flag": torch.tensor([True, False]),
        }
        _, found = load(
            save(tmp_path, model=nn.Linear(2, 2), state={"step": 0}, extra=extra),
            model=nn.Linear(2, 2),
        )
        assert_same(found, extra)

    def test_compiled_and_checkpointed_models_have_plain_names(self, tmp_path):
        model = make_model()
        compiled: Any = torch.compile(model)
        optimizer = make_optimizer(compiled)
        path = save(tmp_path, model=compiled, optimizer=optimizer, state={"step": 0})
        load(path, model=model)
        assert not [name for name in stored(path) if "_orig_mod" in name]

    @pytest.mark.parametrize(
        "make",
        [
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            lambda p: torch.optim.Adagrad(p, lr=0.1),
            lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), amsgrad=True),
            lambda p: torch.optim.Adafactor(p, lr=0.1),
        ],
        ids=["sgd", "adagrad", "adamw-tensor-lr", "adafactor"],
    )
    def test_other_optimizers(self, tmp_path, make):
        def run(model: Any, optimizer: Any, steps: int) -> None:
            for _ in range(steps):
                model(torch.ones(2, 3)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        model = nn.Linear(3, 4)
        optimizer = make(model.parameters())
        run(model, optimizer, 2)
        path = save(tmp_path, model=model, optimizer=optimizer, state={"step": 2})
        other = nn.Linear(3, 4)
        other_optimizer = make(other.parameters())
        load(path, model=other, optimizer=other_optimizer)
        run(model, optimizer, 2)
        run(other, other_optimizer, 2)
        assert_same(other.state_dict(), model.state_dict())


class TestRefusals:
    def test_a_nan_is_never_saved(self, tmp_path):
        model, optimizer = trained()
        good = save(tmp_path, model=model, optimizer=optimizer, state={"step": 2})
        optimizer.state[model.model.norm.weight]["exp_avg"][3] = float("nan")
        with pytest.raises(
            CheckpointError, match=r"optimizer\.model\.norm\.weight\.exp_avg holds a"
        ):
            save(tmp_path, model=model, optimizer=optimizer, state={"step": 3})
        with torch.no_grad():
            model.model.norm.bias[0] = float("-inf")
        with pytest.raises(CheckpointError, match=r"model\.model\.norm\.bias holds a NaN"):
            save(tmp_path, model=model, state={"step": 3})
        with pytest.raises(CheckpointError, match=r"model\.model\.norm\.bias holds a NaN"):
            export(model, None, tmp_path / "model")
        assert list(tmp_path.iterdir()) == [good]

    def test_large_finite_numbers_are_no_infinity(self, tmp_path):
        largest = torch.full((4,), torch.finfo(torch.float32).max)
        path = save(tmp_path, model=nn.Linear(1, 1), state={"step": 0}, extra={"largest": largest})
        assert torch.equal(load(path, model=nn.Linear(1, 1))[1]["largest"], largest)

    @pytest.mark.parametrize("step", [None, -1, 1.0, True, "7"])
    def test_a_state_needs_a_step(self, tmp_path, step):
        with pytest.raises(CheckpointError, match="needs a step from 0 up"):
            save(tmp_path, model=nn.Linear(1, 1), state={"step": step})

    @pytest.mark.parametrize("value", [float("nan"), torch.ones(2), {1, 2}])
    def test_a_state_is_json(self, tmp_path, value):
        with pytest.raises(CheckpointError, match="not JSON"):
            save(tmp_path, model=nn.Linear(1, 1), state={"step": 0, "x": value})
        assert not list(tmp_path.iterdir())

    def test_what_does_not_fit_is_named_and_nothing_touched(self, tmp_path):
        model, optimizer = trained()
        path = save(tmp_path, model=model, optimizer=optimizer, state={"step": 2})
        larger = make_model(max_position_embeddings=8, positions="learned")
        before = {name: tensor.clone() for name, tensor in larger.state_dict().items()}
        with pytest.raises(CheckpointError, match=r"it lacks model\.model\.positions"):
            load(path, model=larger)
        assert_same(larger.state_dict(), before)
        with pytest.raises(CheckpointError, match=r"torch\.float32 there and torch\.float64 here"):
            load(path, model=make_model().double())
        with pytest.raises(CheckpointError, match=r"weight is \[2, 3\] there and \[3, 2\] here"):
            load(
                save(tmp_path / "a", model=nn.Linear(3, 2), state={"step": 0}),
                model=nn.Linear(2, 3),
            )
        with pytest.raises(CheckpointError, match=r"its model\.bias has no place"):
            load(tmp_path / "a" / "step-00000000", model=nn.Linear(3, 2, bias=False))
        with pytest.raises(CheckpointError, match="no optimizer state"):
            load(
                tmp_path / "a" / "step-00000000",
                model=(other := nn.Linear(3, 2)),
                optimizer=torch.optim.SGD(other.parameters()),
            )
        with pytest.raises(CheckpointError, match="mixes parameters of the saved groups"):
            load(path, model=model, optimizer=torch.optim.AdamW(model.parameters()))
        with pytest.raises(CheckpointError, match=r"it lacks extra\.ema"):
            load(path, model=model, extra={"ema": torch.zeros(1)})

    def test_an_optimizer_of_another_model(self, tmp_path):
        other = torch.optim.SGD(nn.Linear(2, 3).parameters())
        with pytest.raises(CheckpointError, match=r"shape \(3, 2\) that is not the model's"):
            save(tmp_path, model=nn.Linear(2, 3), optimizer=other, state={"step": 0})


def two_checkpoints(folder: Path) -> tuple[Path, Path]:
    model, optimizer = trained()
    paths = [
        save(folder, model=model, optimizer=optimizer, state={"step": step}) for step in (2, 10)
    ]
    return paths[0], paths[1]


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def forge(content: bytes) -> Callable[[Path], None]:
    """Write something else to a file, and its size and hash to the manifest."""

    def write(file: Path) -> None:
        file.write_bytes(content)
        listed = manifest.read(file.parent)
        listed[file.name] = {"size": len(content), "sha256": manifest.sha256(file)}
        manifest.write(file.parent, listed)

    return write


def add_a_shard(file: Path) -> None:
    shutil.copy(file, file.with_name("shard-00009-model-00001-of-00001.safetensors"))


class TestDamage:
    @pytest.mark.parametrize(
        ("name", "damage", "message"),
        [
            ("shard-00001-*", truncate, r"shard-00001-\S+ has \d+ of \d+ bytes"),
            ("shard-00001-*", flip_a_bit, r"shard-00001-\S+ was altered"),
            ("shard-00001-*", Path.unlink, r"shard-00001-\S+ is missing"),
            ("shard-00001-*", add_a_shard, r"shard-00009-\S+ is not listed"),
            ("state.json", flip_a_bit, r"state\.json was altered"),
            ("manifest.json", truncate, r"manifest\.json is torn or altered"),
            ("manifest.json", Path.unlink, r"manifest\.json is missing"),
            *(
                (
                    "manifest.json",
                    lambda file, text=text: file.write_text(text),
                    r"manifest\.json is",
                )
                for text in ("{}", "[]", "null", '{"format": 1, "files": [3]}', "[" * 100_000)
            ),
            *(
                ("state.json", forge(text), r"state\.json is not the state of a checkpoint")
                for text in (
                    *(b"{}", b"[]", b"null", b"7", b'"x"', b"", b"\xff", b"[" * 100_000),
                    *(b'{"state": {}}', b'{"state": [], "optimizer": null}'),
                    b'{"state": {"step": "3"}, "optimizer": null}',
                    b'{"state": {"step": 3}, "optimizer": [{}]}',
                    b'{"state": {"step": 3}, "optimizer": 5}',
                )
            ),
        ],
    )
    def test_it_is_named_and_the_one_before_is_used(self, tmp_path, name, damage, message):
        older, newer = two_checkpoints(tmp_path)
        assert latest(tmp_path) == newer
        damage(next(newer.glob(name)))
        model = make_model(seed=1)
        before = model.model.norm.weight.clone()
        with pytest.raises(CheckpointError, match=f"step-00000010.*{message}"):
            load(newer, model=model)
        assert torch.equal(model.model.norm.weight, before)
        reports: list[str] = []
        assert latest(tmp_path, report=reports.append) == older
        assert len(reports) == 1
        assert "step-00000010" in reports[0]
        with pytest.warns(UserWarning, match="step-00000010"):
            assert latest(tmp_path) == older

    def test_where_all_are_damaged_it_refuses(self, tmp_path):
        for path in two_checkpoints(tmp_path):
            (path / "state.json").write_text("{}\n")
        reports: list[str] = []
        with pytest.raises(CheckpointError) as caught:
            latest(tmp_path, report=reports.append)
        assert len(reports) == 2
        assert str(caught.value) == (
            f"no valid checkpoint in {tmp_path}, 2 damaged (the newest: checkpoint "
            f"{tmp_path / 'step-00000010'}: {reports[0].partition(': ')[2].partition(';')[0]}); "
            f"restore one from a backup; to start over, remove the run folder or choose "
            "another --out"
        )

    @pytest.mark.parametrize("text", [b"{}", b"[]", b"null", b'{"state": {"step": 1}'])
    def test_a_malformed_state_is_named_by_all_that_read_it(self, tmp_path, text):
        path, _ = two_checkpoints(tmp_path)
        forge(text)(path / "state.json")
        for read in (checkpoint.read_state, checkpoint.read_document):
            with pytest.raises(CheckpointError, match=r"step-00000002 cannot be read: state\.json"):
                read(path)
        assert prune(tmp_path, keep_last=1) == []  # it is no checkpoint

    def test_a_state_without_what_is_needed_of_it(self, tmp_path):
        path, _ = two_checkpoints(tmp_path)
        assert checkpoint.read_state(path, {"step": int}) == {"step": 2}
        with pytest.raises(CheckpointError, match=r"step-00000002 .*has no 'config'"):
            checkpoint.read_state(path, {"config": dict})
        with pytest.raises(CheckpointError, match=r"'step' in state\.json is 2, not of type dict"):
            checkpoint.read_state(path, {"step": dict})

    def test_a_note_beside_the_files_does_no_harm(self, tmp_path):
        _, newer = two_checkpoints(tmp_path)
        (newer / "notes.txt").write_text("the good one")
        assert latest(tmp_path) == newer

    def test_no_folder_no_checkpoint(self, tmp_path):
        assert latest(tmp_path) is None
        assert latest(tmp_path / "absent") is None

    def test_what_is_not_a_checkpoint_is_refused(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
            load(tmp_path, model=nn.Linear(1, 1))


class TestKeeping:
    def test_the_best_and_the_last_are_kept(self, tmp_path):
        for step in range(0, 60, 10):
            save(tmp_path, model=nn.Linear(1, 1), state={"step": step})
        removed = prune(tmp_path, keep_last=2, best=10)
        assert [path.name[-2:] for path in removed] == ["00", "20", "30"]
        assert list(directory.steps(tmp_path)) == [10, 40, 50]
        with pytest.raises(CheckpointError, match="keep_last=0"):
            prune(tmp_path, keep_last=0)

    def test_a_damaged_one_takes_no_place(self, tmp_path):
        older, newer = two_checkpoints(tmp_path)
        truncate(newer / "state.json")
        assert prune(tmp_path, keep_last=1) == []
        assert older.exists()

    def test_the_same_step_again_replaces(self, tmp_path):
        for value in (1, 2):
            path = save(tmp_path, model=nn.Linear(1, 1), state={"step": 5, "value": value})
        assert list(tmp_path.iterdir()) == [path]
        assert load(path, model=nn.Linear(1, 1))[0]["value"] == 2

    def test_it_replaces_where_the_system_cannot_swap(self, tmp_path, monkeypatch):
        monkeypatch.setattr(files.ctypes, "CDLL", lambda *name, **options: object())
        self.test_the_same_step_again_replaces(tmp_path)

    def test_leftovers_go_at_the_next_save(self, tmp_path):
        for word in ("unfinished", "deleted"):
            leftover = tmp_path / f".step-00000003.{word}-0011aabb"
            leftover.mkdir()
            (leftover / "shard").write_bytes(b"x" * 100)
        path = save(tmp_path, model=nn.Linear(1, 1), state={"step": 5})
        assert list(tmp_path.iterdir()) == [path]

    def test_what_a_killed_prune_left_is_swept(self, tmp_path):
        path = save(tmp_path, model=nn.Linear(1, 1), state={"step": 5})
        for word in ("unfinished", "deleted"):
            (tmp_path / f".step-00000003.{word}-0011aabb").mkdir()
        checkpoint.sweep(tmp_path)
        # A background thread may be writing the unfinished one.
        kept = [".step-00000003.unfinished-0011aabb", path.name]
        assert sorted(path.name for path in tmp_path.iterdir()) == kept

    def test_order_is_by_number(self, tmp_path):
        for step in (99_999_999, 100_000_000):
            path = save(tmp_path, model=nn.Linear(1, 1), state={"step": step})
        assert latest(tmp_path) == path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    try:
        done = run(mount)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"mounting a small disk is not permitted: {done.stderr.strip()}")
    yield place
    run(["umount", str(place)], check=True)


def big(megabytes: int) -> dict[str, torch.Tensor]:
    return {"big": torch.ones(megabytes << 18)}


class TestDisk:
    def test_a_full_disk(self, small_disk):
        folder = small_disk / "checkpoints"
        older = save(folder, model=nn.Linear(1, 1), state={"step": 1}, extra=big(1))
        with pytest.raises(CheckpointError) as caught:
            save(folder, model=nn.Linear(1, 1), state={"step": 2}, extra=big(5))
        assert str(caught.value) == (
            f"checkpoint {folder / 'step-00000002'} cannot be written: No space left on device"
        )
        assert list(folder.iterdir()) == [older]
        assert latest(folder) == older
        newer = save(folder, model=nn.Linear(1, 1), state={"step": 2}, extra=big(1))
        assert latest(folder) == newer

    def test_a_disk_that_fills_behind_the_tensors(self, small_disk):
        """Whatever room is left: the checkpoint is whole or absent."""
        folder = small_disk / "checkpoints"
        older = save(folder, model=nn.Linear(1, 1), state={"step": 1})
        outcomes = set()
        for free in range(0, 80, 4):
            filler = small_disk / "filler"
            with filler.open("wb") as stream:
                room = os.statvfs(small_disk)
                stream.truncate(0)
                stream.write(b"x" * (room.f_bavail * room.f_bsize - free * 1024))
            try:
                path = save(folder, model=nn.Linear(30, 30), state={"step": 2})
            except CheckpointError as error:
                outcomes.add(str(error).rpartition(": ")[2])
                assert latest(folder) == older
            else:
                assert latest(folder) == path
                outcomes.add("saved")
                shutil.rmtree(path)
            filler.unlink()
        assert outcomes == {"No space left on device", "saved"}

    def test_a_file_that_may_not_grow(self, tmp_path):
        older = save(tmp_path, model=nn.Linear(1, 1), state={"step": 1})
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        try:
            with pytest.raises(CheckpointError, match=r"cannot be written: File too large$"):
                save(tmp_path, model=nn.Linear(1, 1), state={"step": 2}, extra=big(4))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert list(tmp_path.iterdir()) == [older]

    def test_a_read_only_disk(self, small_disk):
        older = save(small_disk / "checkpoints", model=nn.Linear(1, 1), state={"step": 1})
        run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        with pytest.raises(CheckpointError, match=r"cannot be written: Read-only file system$"):
            save(small_disk / "checkpoints", model=nn.Linear(1, 1), state={"step": 2})
        assert latest(small_disk / "checkpoints") == older

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write to any folder")
    def test_a_read_only_folder(self, tmp_path):
        older = save(tmp_path, model=nn.Linear(1, 1), state={"step": 1})
        tmp_path.chmod(0o555)
        try:
            with pytest.raises(CheckpointError, match=r"cannot be written: Permission denied$"):
                save(tmp_path, model=nn.Linear(1, 1), state={"step": 2})
        finally:
            tmp_path.chmod(0o755)
        assert latest(tmp_path) == older

    def test_a_file_in_the_way(self, tmp_path):
        (tmp_path / "checkpoints").write_text("")
        with pytest.raises(CheckpointError, match=r"cannot be written: File exists$"):
            save(tmp_path / "checkpoints", model=nn.Linear(1, 1), state={"step": 2})


@pytest.fixture
def fast_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one, for tests that save hundreds of times."""
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


class Interrupter:
    """Raises KeyboardInterrupt at one line of what this thread runs, as a signal would."""

    def __init__(self, code: CodeType, line: int) -> None:
        self.code, self.line, self.raised = code, line, False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code is not self.code:
            return None
        if event == "line" and frame.f_lineno == self.line and not self.raised:
            self.raised = True
            raise KeyboardInterrupt
        return self


def traced(function: Callable[[], Any], trace: Any) -> Any:
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return function()
    finally:
        sys.settrace(before)


def lines_of(function: Callable[[], Any]) -> list[tuple[CodeType, int]]:
    """Every line that a function runs, its callees' and the callbacks' of what it frees."""
    seen: dict[tuple[CodeType, int], None] = {}

    def note(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            seen[frame.f_code, frame.f_lineno] = None
        return note

    traced(function, note)
    return [*seen]


def check_interrupts(folder: Path, each: int) -> None:
    """Interrupt a save at one line after another, at every `each`-th of those that it runs."""
    model = nn.Linear(1, 1)

    def save_again() -> Path:
        return save(folder, model=model, state={"step": 2})

    older = save(folder, model=model, state={"step": 1})
    save_again()
    skipped: list[str] = []
    for code, line in lines_of(save_again)[::each]:
        interrupter = Interrupter(code, line)
        try:
            traced(save_again, interrupter)
        except KeyboardInterrupt:
            pass
        else:
            assert not interrupter.raised, f"lost in {code}, line {line}"
        assert latest(folder, report=skipped.append, hashes=False) is not None
        assert not skipped, f"half a checkpoint after {code}, line {line}"
    assert latest(folder) == save_again()
    assert sorted(path.name for path in folder.iterdir()) == [older.name, "step-00000002"]


def check_signal(folder: Path) -> None:
    """A real SIGINT while this process saves."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it may have been ignored

    def interrupt_a_save() -> None:
        wait_until(lambda: list(folder.glob(UNFINISHED)), pause=0.001)
        os.kill(os.getpid(), signal.SIGINT)

    def save_on() -> None:
        for _ in range(100):  # of one step: each replaces the one before
            save(folder, model=model, state={"step": 1})
        thread.join(timeout=LIMIT)

    model = Filled()
    save(folder, model=model, state={"step": 0})
    thread = threading.Thread(target=interrupt_a_save, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        save_on()
    assert latest(folder) == max(folder.glob("step-*"))


class TestInterrupts:
    """In processes of their own: an interrupt can leave a lock of the standard library locked."""

    def test_a_save_runs_no_weakref_callbacks(self, fast_disk):
        """Python ignores a KeyboardInterrupt that arrives in one of them."""

        def save_again() -> Path:
            return save(fast_disk, model=nn.Linear(1, 1), state={"step": 2})

        save_again()
        files = {Path(code.co_filename).stem for code, _ in lines_of(save_again)}
        assert "manifest" in files
        assert not files & {"weakref", "_weakrefset"}

    @pytest.mark.parametrize("each", [40, pytest.param(1, marks=pytest.mark.slow)])
    def test_an_interrupt_at_any_line_of_a_save_is_raised(self, fast_disk, each):
        run_apart(check_interrupts, fast_disk, each)

    def test_a_signal_while_saving_is_raised(self, tmp_path):
        run_apart(check_signal, tmp_path)


class TestBackground:
    def test_it_writes_what_was_when_it_was_called(self, tmp_path):
        model, optimizer = trained()
        extra = {"average": torch.zeros(1 << 20)}
        whole = save(
            tmp_path / "sync", model=model, optimizer=optimizer, state={"step": 2}, extra=extra
        )
        with AsyncSaver() as saver:
            saver.save(
                tmp_path / "async", model=model, optimizer=optimizer, state={"step": 2}, extra=extra
            )
            extra["average"] += 1
            for step in range(3, 6):
                step_once(model, optimizer, step)
            path = saver.wait()
            assert saver.wait() is None
        assert path == tmp_path / "async" / "step-00000002"
        assert_same(stored(path), stored(whole))
        assert (path / "state.json").read_text() == (whole / "state.json").read_text()

    def test_one_at_a_time_in_order(self, tmp_path):
        with AsyncSaver() as saver:
            for step in range(4):
                saver.save(tmp_path, model=Filled().fill(step), state={"step": step})
        assert list(directory.steps(tmp_path)) == [0, 1, 2, 3]
        assert not list(tmp_path.glob(UNFINISHED))

    def test_training_goes_on_while_it_writes(self, tmp_path, monkeypatch):
        gate = threading.Event()

        def write_behind_gate(*arguments: Any) -> Path:
            gate.wait(timeout=LIMIT)
            return writer.write(*arguments)

        monkeypatch.setattr(async_saver, "write", write_behind_gate)
        with AsyncSaver() as saver:
            saver.save(tmp_path, model=nn.Linear(1, 1), state={"step": 1})
            assert not list(tmp_path.iterdir())  # and yet `save` is back
            gate.set()
            assert saver.wait() == latest(tmp_path) != None  # noqa: E711

    def test_an_error_surfaces_at_the_next_call_and_only_once(self, tmp_path):
        (tmp_path / "file").write_text("")
        saver = AsyncSaver()
        saver.save(tmp_path / "file", model=nn.Linear(1, 1), state={"step": 1})
        with pytest.raises(CheckpointError, match="cannot be written"):
            saver.save(tmp_path, model=nn.Linear(1, 1), state={"step": 2})
        saver.save(tmp_path, model=nn.Linear(1, 1), state={"step": 3})
        assert saver.wait() == tmp_path / "step-00000003"
        with pytest.raises(CheckpointError, match="cannot be written"), AsyncSaver() as saver:
            saver.save(tmp_path / "file", model=nn.Linear(1, 1), state={"step": 1})

    def test_an_error_nobody_waits_for_is_a_warning(self, tmp_path):
        (tmp_path / "file").write_text("")
        saver = AsyncSaver()
        saver.save(tmp_path / "file", model=nn.Linear(1, 1), state={"step": 1})
        with pytest.warns(UserWarning, match="cannot be written"):
            del saver

    def test_a_nan_is_refused_at_once(self, tmp_path):
        with AsyncSaver() as saver, pytest.raises(CheckpointError, match="holds a NaN"):
            saver.save(
                tmp_path,
                model=nn.Linear(1, 1),
                state={"step": 1},
                extra={"x": torch.tensor(float("nan"))},
            )


class TestExport:
    def test_auto_classes_load_it_and_it_replaces_an_older_one(self, tmp_path):
        import transformers

        from tokenformer.data.byte_tokenizer import byte_tokenizer

        folder = tmp_path / "model"
        older, _ = trained(1)
        export(older, None, folder)
        (folder / "stale.txt").write_text("")
        model, _ = trained(2)
        assert export(torch.compile(model), byte_tokenizer(), folder) == folder
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
        assert not (folder / "stale.txt").exists()
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert_same(loaded.state_dict(), model.state_dict())
        assert transformers.AutoTokenizer.from_pretrained(folder).decode([104, 105]) == "hi"

    def test_a_full_disk_leaves_the_older_export(self, small_disk):
        import transformers

        folder = small_disk / "model"
        model, _ = trained(1)
        export(model, None, folder)
        (small_disk / "filler").write_bytes(b"x" * (3 << 20))
        for layer in model.model.layers:
            layer.ffn.key_tokens = nn.Parameter(torch.zeros(1 << 13, 32))
        with pytest.raises(CheckpointError, match=r"export .*model cannot be written: .+"):
            export(model, None, folder)
        assert sorted(path.name for path in small_disk.iterdir()) == ["filler", "model"]
        transformers.AutoModelForCausalLM.from_pretrained(folder)


def run_worker(*arguments: object, count: int = 1) -> list[str]:
    """Start `count` processes at once; {rank} in an argument is the number of each."""
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.train.checkpoint_worker"),
                *(str(argument).format(rank=rank) for argument in arguments),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait(timeout=LIMIT)
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [output for output, _ in outputs]


@pytest.mark.parametrize("wrapping", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_one_process_to_two_and_back(tmp_path, wrapping):
    """Two processes go on from the checkpoint of one, and one from that of the two."""
    import transformers

    model, optimizer = trained(2)
    average = {name: 2 * p.detach() for name, p in model.named_parameters()}
    first = save(
        tmp_path / "one", model=model, optimizer=optimizer, state={"step": 2}, extra=average
    )
    unbroken = [step_once(model, optimizer, step) for step in (3, 4)]

    run_worker("train", wrapping, "{rank}", 2, tmp_path, count=2)
    results = [json.loads((tmp_path / f"result-{rank}.json").read_text()) for rank in range(2)]
    for rank, result in enumerate(results):
        assert result["state"] == {"step": 2}
        assert result["losses"] == pytest.approx(unbroken, rel=1e-6), rank
        large, broken, *torn = result["errors"]
        assert large.endswith("step-00000005 cannot be written: File too large (rank 1)")
        assert broken == "step 5 is not saved: extra.broken holds a NaN or an infinity (rank 1)"
        assert len(torn) == (rank == 0)  # one reports, all pass it over
        assert result["found"] == "step-00000006"
        assert "no valid checkpoint in" in result["refused"], rank
        assert "choose another --out" in result["refused"]

    # What two processes loaded and saved again is what one had, to the last bit.
    again = make_model(seed=1)
    again_optimizer = make_optimizer(again)
    second = latest(tmp_path / "again")
    assert second is not None
    assert len(list(second.glob("*.safetensors"))) == 2
    _, extra = load(second, model=again, optimizer=again_optimizer)
    assert_same(extra, average)
    back = save(
        tmp_path / "back", model=again, optimizer=again_optimizer, state={"step": 2}, extra=extra
    )
    assert_same(
        {name: tensor for name, tensor in stored(back).items() if not name.startswith("rng")},
        {name: tensor for name, tensor in stored(first).items() if not name.startswith("rng")},
    )

    resumed = make_model(seed=1)
    resumed_optimizer = make_optimizer(resumed)
    assert list(directory.steps(tmp_path / "two")) == [3]
    third = latest(tmp_path / "two")
    assert third is not None
    state, extra = load(third, model=resumed, optimizer=resumed_optimizer)
    assert state == {"step": 3}
    assert_same(extra, {f"odd{n}": torch.arange(float(n)) for n in (1, 3)})
    assert step_once(resumed, resumed_optimizer, 4) == pytest.approx(unbroken[1], rel=1e-6)
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(exported) is type(model)
    for one in (resumed, exported):
        for name, tensor in one.state_dict().items():
            torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rounds", [4, pytest.param(25, marks=pytest.mark.slow)])
def test_killed_inside_saves(tmp_path, rounds):
    (output,) = run_worker("kill", tmp_path, rounds)
    killed = [json.loads(line) for line in output.splitlines()]
    assert len(killed) == rounds
    steps = [step for step, _ in killed]
    assert steps == sorted(set(steps)), "each process got further than the one before"
    # Half of them are aimed inside a save; a machine under load may miss a few.
    assert sum(left > 0 for _, left in killed) >= rounds // 4, killed
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no torn checkpoint, not even one passed over
        path = latest(tmp_path)
    assert path is not None
    save(tmp_path, model=Filled().fill(0), state={"step": steps[-1] + 1})
    assert not list(tmp_path.glob(UNFINISHED))
