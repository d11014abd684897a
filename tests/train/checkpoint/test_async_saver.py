"""Checkpoints that are written in the background."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.checkpoint_worker import UNFINISHED, Filled, step_once
from tests.support.checkpoints import assert_same, stored, trained
from tests.support.processes import LIMIT
from tokenformer.errors import CheckpointError
from tokenformer.train.checkpoint import async_saver, directory, latest, save, writer
from tokenformer.train.checkpoint.async_saver import AsyncSaver

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


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
