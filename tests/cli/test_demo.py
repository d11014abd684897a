"""The demo as a newcomer runs it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tokenformer.cli.errors import InputError
from tokenformer.cli.folder import new_folder
from tokenformer.cli.terminal import printable

COMMAND = [sys.executable, "-m", "tokenformer", "demo"]


def demo(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def test_demo_keeps_a_model_that_transformers_can_load(tmp_path):
    out = tmp_path / "kept"
    # An ASCII terminal is the hardest: the untrained model's sample is full of other characters.
    done = demo("--steps", 3, "--out", out, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "def main" in done.stdout

    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert {"step", "tokens", "flops", "seconds", "loss", "lr"} <= rows[0].keys()
    assert {"val_loss", "val_bpb"} <= rows[-1].keys()
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    assert type(model).__name__ == "TokenformerForCausalLM"
    written = model.generate(**tokenizer("import ", return_tensors="pt"), max_new_tokens=4)
    assert tokenizer.decode(written[0]).startswith("import ")


def test_demo_refuses_a_folder_in_use(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    done = demo("--steps", 1, "--out", tmp_path)
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


def test_demo_refuses_a_path_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    done = demo("--steps", 1, "--out", tmp_path / "file" / "below")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_an_interrupted_demo_says_so_and_leaves_nothing_behind(tmp_path):
    out = tmp_path / "kept"
    running = subprocess.Popen(
        [*COMMAND, "--steps", "100000", "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while (
        not list(tmp_path.glob(".kept.unfinished-*/metrics.jsonl")) and time.monotonic() < deadline
    ):
        time.sleep(0.1)
    assert list(tmp_path.iterdir()), "it works beside its final name"
    running.send_signal(signal.SIGINT)
    assert running.communicate(timeout=30)[1].endswith("tokenformer demo: interrupted\n")
    assert running.returncode == 130
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_whole_or_absent(tmp_path):
    with new_folder("--out", tmp_path / "a" / "b") as unfinished:
        (unfinished / "file").write_text("x")
        assert not (tmp_path / "a" / "b").exists()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
    assert (tmp_path / "a" / "b" / "file").read_text() == "x"

    empty = tmp_path / "empty"
    empty.mkdir()
    with contextlib.suppress(RuntimeError), new_folder("--out", empty) as unfinished:
        (unfinished / "file").write_text("x")
        raise RuntimeError
    assert list(empty.iterdir()) == []
    with new_folder("--out", empty) as unfinished:
        (unfinished / "file").write_text("x")
    assert (empty / "file").exists()
    with pytest.raises(InputError, match="in use"), new_folder("--out", empty):
        pass


def test_a_sample_cannot_steer_the_terminal():
    assert printable("a\x1b[2Jb\x9bc\td\n\x00", "utf-8") == "a\ufffd[2Jb\ufffdc\td\n\ufffd"
    assert printable("é\ufffd", "ascii") == "??"


@pytest.mark.slow
def test_the_whole_demo_learns(tmp_path):
    done = demo("--out", tmp_path / "kept")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "kept" / "metrics.jsonl").open()]
    assert rows[-1]["val_bpb"] < 2.5
    assert rows[0]["loss"] > 5
