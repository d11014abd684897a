"""Saving on full disks, and interrupts at every line."""

import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from torch import nn

from tests.support.checkpoint_worker import UNFINISHED, Filled
from tests.support.checkpoints import big
from tests.support.processes import LIMIT, run, run_apart, wait_until
from tokenformer.errors import CheckpointError
from tokenformer.train.checkpoint import latest, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


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
