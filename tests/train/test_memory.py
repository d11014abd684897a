"""Out-of-memory errors say what to lower."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tokenformer.cli import main
from tokenformer.train.memory import (
    OutOfMemoryError,
    check_memory,
    explained_memory,
    free_bytes,
    free_in_group,
)
from tokenformer.train.options import RunOptions

CPU = torch.device("cpu")


def test_a_batch_that_cannot_fit_is_refused(recipe: Path, tmp_path: Path, capsys: Any) -> None:
    batch = ["--run.batch_size", "1000000000", "--run.micro_batch_size", "null"]
    with pytest.raises(SystemExit) as end:
        main(["train", str(recipe), "--out", str(tmp_path / "run"), *batch])
    assert end.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "a micro-batch of 1,000,000,000 needs more than" in line
    assert "lower run.micro_batch_size (the global batch stays as it is) or run.batch_size" in line
    assert not (tmp_path / "run").exists()


def test_a_micro_batch_that_fits_is_taken():
    free = free_bytes(CPU)
    assert 1 << 20 < free < 1 << 60
    check_memory(free // 100, 1, RunOptions(), CPU)
    with pytest.raises(OutOfMemoryError, match="micro-batch of 1,000"):
        check_memory(free // 100, 1000, RunOptions(), CPU)
    check_memory(free // 100, 1000, RunOptions(activation_checkpointing=True), CPU)


def test_cached_files_are_free_memory(tmp_path: Path) -> None:
    for name, text in {"max": "1000", "current": "900", "stat": "anon 200\nfile 700\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert free_in_group(tmp_path) == 100
    (tmp_path / "memory.stat").write_text("anon 200\ninactive_file 400\nactive_file 250\n")
    assert free_in_group(tmp_path) == 750
    (tmp_path / "memory.current").write_text("2000")
    assert free_in_group(tmp_path) == 0
    (tmp_path / "memory.stat").unlink()
    assert free_in_group(tmp_path) == 0


@pytest.mark.parametrize("allocate", [lambda: torch.empty(1 << 55), lambda: bytearray(1 << 60)])
def test_a_failed_allocation_is_explained(allocate):
    message = r"cpu is out of memory .* micro-batch of 64; lower"
    with pytest.raises(OutOfMemoryError, match=message), explained_memory(64, CPU):
        allocate()


def test_other_errors_stay_as_they_are():
    message = "shapes cannot be multiplied"
    with pytest.raises(RuntimeError, match=message), explained_memory(64, CPU):
        torch.ones(2, 3) @ torch.ones(2, 3)
