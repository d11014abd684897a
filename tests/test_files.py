"""Atomic writes, temporary folders, locks and the cache folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokenformer.errors import InputError
from tokenformer.files import (
    cache_folder,
    finish_folder,
    lock_folder,
    new_folder,
    remove_folder,
    start_folder,
    write_atomic,
)
from tokenformer.models.checksums import read_verified, remember


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "state.json"
    write_atomic(path, "old")

    def full(handle: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["state.json"]


def test_a_folder_replaces_an_older_one_and_leaves_no_temporary_ones(tmp_path: Path) -> None:
    path = tmp_path / "model"
    for text in ("old", "new"):
        unfinished = start_folder(path, siblings="model")
        (unfinished / "file").write_text(text)
        finish_folder(unfinished, path)
    assert (path / "file").read_text() == "new"
    assert names(tmp_path) == ["model"]
    killed = start_folder(path, siblings="model")
    assert killed.exists()
    start_folder(path, siblings="model").rmdir()
    assert names(tmp_path) == ["model"], "leftovers are deleted"
    remove_folder(path)
    assert names(tmp_path) == []


def test_a_block_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with pytest.raises(FileNotFoundError), new_folder("--out", path) as unfinished:
        (unfinished / "missing" / "file").write_text("fails")
    assert names(tmp_path) == []
    with new_folder("--out", path) as unfinished:
        (unfinished / "file").write_text("whole")
    assert names(path) == ["file"]
    with pytest.raises(InputError, match="already exists"), new_folder("--out", path):
        pass


def test_another_process_cannot_take_a_lock(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from tokenformer.files import lock_folder\n"
        "with lock_folder(pathlib.Path(sys.argv[1])): pass"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    with lock_folder(tmp_path / "run"):
        blocked = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "BlockingIOError" in blocked.stderr
    assert subprocess.run(command, timeout=120).returncode == 0


def test_without_a_home_there_is_no_cache(tmp_path: Path) -> None:
    """As in a container with a user id that has no entry in /etc/passwd."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HOME", raising=False)
        patch.delenv("XDG_CACHE_HOME", raising=False)
        patch.setattr("os.getuid", lambda: 2**31 - 9)
        with pytest.raises(OSError, match="no home folder"):
            cache_folder()
        assert read_verified() == {}
        remember({}, {"a": [1, 2, None]})
