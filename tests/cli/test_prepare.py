"""`tokenformer prepare` as users run it: real processes, kills, two at a time, terminals."""

import gzip
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from tokenformer.data.corpus import Corpus
from tokenformer.data.errors import DataError
from tokenformer.data.standard_library import source_files

COMMAND = [sys.executable, "-m", "tokenformer", "prepare"]


def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, **options
    )


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """Four megabytes of real documents, a row each."""
    rows = tmp_path_factory.mktemp("sources") / "rows.jsonl"
    size = 0
    with rows.open("w") as file:
        for path in source_files(Path(sysconfig.get_path("stdlib"))):
            text = path.read_text(encoding="utf-8", errors="replace")
            file.write(json.dumps({"text": text}) + "\n")
            size += len(text)
            if size > 4_000_000:
                return rows
    raise AssertionError("the standard library is larger than that")


@pytest.fixture(scope="module")
def tokenizer(sources) -> Path:
    """A small BPE; an encoder slow enough to be killed at work."""
    from tokenformer.data.tokenizer import train_bpe

    texts = [json.loads(line)["text"] for line in sources.read_text().splitlines()[:40]]
    folder = sources.parent / "tokenizer"
    train_bpe(iter(texts), 1000).save(folder)
    return folder / "tokenizer.json"


def test_a_text_file_to_shards(tmp_path):
    (tmp_path / "book.txt").write_text("It was a dark and stormy night.\n" * 100)
    done = run("book.txt", "--out", "data/book", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "train: 3,041 tokens, 1 documents, 3,040 bytes" in done.stdout
    assert done.stdout.endswith("Kept in data/book\n")
    out = tmp_path / "data" / "book"
    assert {path.name for path in out.iterdir()} == {
        "index.json",
        "train-00000.bin",
        "validation-00000.bin",
        "tokenizer",
    }
    before = contents(out)
    again = run("book.txt", "--out", "data/book", "--json", cwd=tmp_path)
    assert "prepared already" in again.stderr
    assert json.loads(again.stdout) == json.loads(before["index.json"])
    assert contents(out) == before

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out / "tokenizer")
    text = tokenizer.decode(Corpus(out).split("validation")[:].tolist())
    assert text == "It was a dark and stormy night.\n" * 5 + "<|endoftext|>"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["book.txt"], "--out is missing"),
        (["nothing.txt", "--out", "new"], "nothing.txt does not exist"),
        (["book.txt", "--out", "full"], "--out full is in use"),
        (["book.txt", "--out", "book.txt/below"], "--out book.txt/below cannot be made"),
        (["texts", "--out", "texts/new"], "--out texts/new lies in the corpus texts"),
        (["book.txt", "--out", "new", "--validation", "1.5"], "--validation 1.5 must be"),
        (["book.txt", "--out", "new", "--seed", "-1"], "--seed -1 must be"),
        (["book.txt", "--out", "new", "--workers", "0"], "--workers 0 must be"),
        (["book.txt", "--out", "new", "--shard_tokens", "0"], "--shard_tokens 0 must be"),
        (["book.txt", "--out", "done", "--seed", "3"], "--out done was made with --seed 0, not 3"),
        (["other.txt", "--out", "done"], "--out done holds another corpus"),
        (["rows.jsonl", "--out", "new"], "--text_field"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(folder, arguments, named):
    before = contents(folder)
    done = run(*arguments, cwd=folder)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert named in done.stderr
    assert contents(folder) == before
    assert not (folder / "new").exists()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("bad")
    (place / "book.txt").write_text("A book.\n" * 50)
    (place / "other.txt").write_text("A cook.\n" * 50)
    (place / "rows.jsonl").write_text('{"body": "a"}\n')
    for name in ("full", "texts"):
        (place / name).mkdir()
        (place / name / "precious.txt").write_text("mine")
    assert run("book.txt", "--out", "done", cwd=place).returncode == 0
    return place


def position(out: Path) -> list[int] | None:
    try:
        return json.loads((out / "unfinished.json").read_text())["position"]
    except FileNotFoundError:
        return None


def kill_after_progress(command: list[str], out: Path) -> bool:
    """Start, wait until the journal has moved on, SIGKILL. False if it came to its end before."""
    before = position(out)
    running = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while position(out) in (None, before) and running.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if running.poll() is not None:
        assert running.returncode == 0, running.communicate()[1]
        return False
    children = psutil.Process(running.pid).children(recursive=True)
    running.kill()
    running.communicate()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive, "a worker does not outlive its parent"
    return True


def test_killed_again_and_again_the_result_is_that_of_an_unbroken_run(tmp_path, sources, tokenizer):
    options = ["--tokenizer", tokenizer, "--shard_tokens", 300_000, "--workers", 2]
    whole = run(sources, "--out", tmp_path / "whole", *options)
    assert whole.returncode == 0, whole.stderr

    out = tmp_path / "broken"
    command = [*COMMAND, str(sources), "--out", str(out), *map(str, options)]
    kills = 0
    while kills < 2 and kill_after_progress(command, out):
        kills += 1
        with pytest.raises(DataError, match="is not finished"):
            Corpus(out)
    assert kills >= 1
    other = run(sources, "--out", out, *options, "--validation", 0.5)
    assert other.returncode == 2
    assert "was made with --validation None, not 0.5" in other.stderr
    done = run(sources, "--out", out, *options)
    assert done.returncode == 0, done.stderr
    assert contents(out) == contents(tmp_path / "whole")
    Corpus(out).verify()


def test_the_number_of_processes_changes_nothing(tmp_path, sources, tokenizer):
    few = tmp_path / "few.jsonl"
    few.write_text("".join(sources.open().readlines()[:10]))
    for workers in (1, 3):
        done = run(
            few, "--out", tmp_path / f"{workers}", "--tokenizer", tokenizer, "--workers", workers
        )
        assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "1") == contents(tmp_path / "3")


def test_interrupted_it_says_so_and_goes_on_later(tmp_path, sources, tokenizer):
    out, many = tmp_path / "out", tmp_path / "many.jsonl"
    many.write_text(6 * sources.read_text())  # which takes long enough to be interrupted
    command = [*COMMAND, str(many), "--out", str(out), "--tokenizer", str(tokenizer)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while position(out) is None and running.poll() is None:
        time.sleep(0.002)
    running.send_signal(signal.SIGSTOP)  # or it might be done before the second has begun
    second = run(many, "--out", out, "--tokenizer", tokenizer)
    assert second.returncode == 2
    assert "is being filled by another process" in second.stderr
    running.send_signal(signal.SIGINT)
    running.send_signal(signal.SIGCONT)
    assert running.communicate(timeout=30)[1] == "tokenformer prepare: interrupted\n"
    assert running.returncode == 130
    done = run(many, "--out", out, "--tokenizer", tokenizer)
    assert done.returncode == 0, done.stderr
    assert f"going on with {out}" in done.stdout
    Corpus(out).verify()


# The high-water mark is set back first: it begins at that of the process that started this one.
PEAK = """
import pathlib, sys
from tokenformer.cli import main
pathlib.Path("/proc/self/clear_refs").write_text("5")
main(sys.argv[1:])
status = pathlib.Path("/proc/self/status").read_text()
sys.stderr.write(str(int(status.partition("VmHWM:")[2].split()[0]) * 1024))
"""


def peak_memory(*arguments: object) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PEAK, "prepare", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stderr)


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """Sixteen times the text, a lone file or rows, and the same peak."""
    block = np.random.default_rng(0).integers(97, 123, 1_000_000, dtype=np.uint8)
    block[::50] = 10
    row = json.dumps({"text": block.tobytes().decode()}).encode() + b"\n"
    for name, content in (("text", block.tobytes()), ("rows.jsonl", row)):
        peaks = []
        for megabytes in (4, 64):
            path = tmp_path / f"{megabytes}-{name}.gz"
            with gzip.open(path, "wb", compresslevel=1) as file:
                for _ in range(megabytes):
                    file.write(content)
            peaks.append(peak_memory(path, "--out", tmp_path / f"out-{megabytes}-{name}"))
        assert peaks[1] - peaks[0] < 15_000_000


def test_a_full_disk_is_one_clear_line_and_nothing_is_lost(tmp_path, sources, tokenizer):
    """A limit on the size of files stands for the disk; after it is lifted the work goes on."""
    out = tmp_path / "out"
    limited = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000)); "
        "from tokenformer.cli import main; main(sys.argv[1:])"
    )
    arguments = ["prepare", sources, "--out", out, "--workers", "1"]
    done = subprocess.run(
        [sys.executable, "-c", limited, *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == f"tokenformer prepare: --out {out} cannot be written: File too large\n"
    done = run(sources, "--out", out)
    assert done.returncode == 0, done.stderr
    Corpus(out).verify()


def test_a_terminal_sees_a_bar(tmp_path, sources):
    import pty

    primary, secondary = pty.openpty()
    running = subprocess.Popen(
        [*COMMAND, str(sources), "--out", str(tmp_path / "out")],
        stdout=secondary,
        stderr=secondary,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(secondary)
    shown = b""
    try:
        while block := os.read(primary, 4096):
            shown += block
    except OSError:  # the other end is closed
        pass
    os.close(primary)
    assert running.wait() == 0
    assert "━".encode() in shown
    assert b"MB of text" in shown
