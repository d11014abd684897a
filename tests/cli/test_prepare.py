"""`tokenformer prepare` in real processes: kills, Ctrl-C, full disks, terminals."""

import gzip
import json
import os
import signal
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.support.processes import LIMIT, take_interrupts, wait_until
from tokenformer.cli import main
from tokenformer.data.corpus import Corpus
from tokenformer.data.standard_library import source_files
from tokenformer.errors import DataError

COMMAND = [sys.executable, "-m", "tokenformer", "prepare"]


def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, **options)


def run_here(*arguments: object) -> int:
    """Run in this process, so that `capsys` captures the output; return the exit code."""
    try:
        main(["prepare", *map(str, arguments)])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """Four megabytes of real documents, one per row."""
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
    """A small BPE, slow enough to kill the command while it encodes."""
    from tokenformer.data.tokenizer import train_bpe

    texts = [json.loads(line)["text"] for line in sources.read_text().splitlines()[:40]]
    folder = sources.parent / "tokenizer"
    train_bpe(iter(texts), 1000).save(folder)
    return folder / "tokenizer.json"


def test_a_text_file_to_shards(tmp_path):
    (tmp_path / "book.txt").write_text("It was a dark and stormy night.\n" * 100)
    done = run("book.txt", "--out", "data/book", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "train: 3,041 tokens, 1 document, 3,040 bytes" in done.stdout
    assert done.stdout.endswith("Saved to data/book\n")
    out = tmp_path / "data" / "book"
    assert {path.name for path in out.iterdir()} == {
        "index.json",
        "train-00000.bin",
        "validation-00000.bin",
        "tokenizer",
    }
    before = contents(out)
    again = run("book.txt", "--out", "data/book", "--json", cwd=tmp_path)
    assert "already prepared" in again.stderr
    assert json.loads(again.stdout) == json.loads(before["index.json"])
    assert contents(out) == before

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out / "tokenizer")
    text = tokenizer.decode(Corpus(out).split("validation")[:].tolist())
    assert text == "It was a dark and stormy night.\n" * 5 + "<|endoftext|>"


def test_a_corpus_without_validation_says_how_to_train_on_it(tmp_path, capsys):
    (tmp_path / "book.txt").write_text("It was a dark and stormy night.\n" * 100)
    (tmp_path / "row.jsonl").write_text('{"text": "all there is"}\n')
    remedy = "No validation split: train with --run.validate_every 0, "
    for _ in range(2):  # also if it is already prepared
        assert run_here(tmp_path / "book.txt", "--out", tmp_path / "a", "--validation", 0) == 0
        said = capsys.readouterr().out
        assert said.endswith(f"{remedy}or prepare it in another folder with --validation 0.05\n")
    assert run_here(tmp_path / "row.jsonl", "--out", tmp_path / "b", "--json") == 0
    said = capsys.readouterr()
    assert list(json.loads(said.out)["splits"]) == ["train"]
    assert said.err == f"{remedy}because there are too few documents to hold one out\n"
    assert run_here(tmp_path / "book.txt", "--out", tmp_path / "c") == 0
    assert "No validation" not in capsys.readouterr().out


def test_read_options(tmp_path, capsys):
    (tmp_path / "old.txt").write_bytes("naïve café\n".encode("latin-1") * 20)
    (tmp_path / "bomb.txt.gz").write_bytes(gzip.compress(b"a line\n" * 2_500_000))
    (tmp_path / "row.jsonl").write_text('{"text": "all there is"}\n')
    for name, refusal, options in (
        (
            "old.txt",
            "byte 0xef at offset 2; set its encoding with --encoding",
            ["--encoding=cp1252"],
        ),
        ("bomb.txt.gz", "raise the limit with --max_ratio 1000, or", ["--max_ratio", "0"]),
        ("row.jsonl", "allow longer rows with --max_row_bytes", ["--max_row_bytes", "100"]),
    ):
        path, out = tmp_path / name, tmp_path / f"{name}-out"
        few = ["--max_row_bytes", "10"] if name == "row.jsonl" else []
        assert run_here(path, "--out", out, *few) == 2
        said = capsys.readouterr().err
        assert refusal in said
        assert said.count("\n") == 1
        assert not out.exists()
        assert run_here(path, "--out", out, *options) == 0
    assert Corpus(tmp_path / "old.txt-out").split("train")[:5].tolist() == [*"naïv".encode()]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["book.txt"], "--out is missing"),
        (["nothing.txt", "--out", "new"], "no nothing.txt (pass a file, a folder, or a dataset"),
        (["bok.txt", "--out", "new"], "no bok.txt; did you mean book.txt?"),
        (["./txts", "--out", "new"], "no ./txts; did you mean texts?"),
        (["texts/precios", "--out", "new"], "no texts/precios; did you mean texts/precious.txt?"),
        (["datasets:./txts", "--out", "new"], "dataset ./txts was not found: no ./txts; did you"),
        (["book.txt", "--out", "new", "--tokenizer", "full/tok"], "--tokenizer: no full/tok (pass"),
        (["book.txt", "--out", "new", "--tokenizer", "tok.json"], "--tokenizer: no tok.json"),
        (["book.txt", "--out", "new", "--tokenizer", "./txts"], "--tokenizer: no ./txts; did you"),
        (["book.txt", "--out", "full"], "--out full already exists"),
        (["book.txt", "--out", "book.txt/below"], "--out book.txt/below cannot be created"),
        (["texts", "--out", "texts/new"], "--out texts/new is inside the corpus texts"),
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
def test_bad_input_is_one_line_and_exit_code_2(folder, arguments, named, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    before = contents(folder)
    assert run_here(*arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert named in said
    assert contents(folder) == before
    assert not (folder / "new").exists()


NO_HUB = """
import sys
from tokenformer.cli import main
try:
    main(["prepare", *sys.argv[1:]])
finally:
    heavy = {"torch", "transformers", "datasets", "pyarrow"} & sys.modules.keys()
    sys.stderr.write(f"imported: {sorted(heavy)}")
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["boook", "--out", "new"], "boook is neither a folder here nor a dataset on the hub"),
        (["book.txt", "--out", "new", "--tokenizer", "no/one"], "--tokenizer: no/one is neither"),
    ],
)
def test_the_hub_is_checked_once_before_slow_imports(folder, arguments, message):
    """With an unreachable hub: a local port that nothing listens on."""
    hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", NO_HUB, *arguments],
        cwd=folder,
        env={**os.environ, **hub},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    line, imported = done.stderr.splitlines()
    assert message in line
    assert "could not connect" in line
    assert imported == "imported: []"
    assert "Retry" not in done.stderr
    assert done.returncode == 2
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


# Saves its progress after the first chunk instead of after a second.
SIGNALLED_AFTER_PROGRESS = """
import os, sys
import psutil
from tokenformer.cli import main
from tokenformer.data import preparation

sync = preparation.Preparation.sync

def sync_once(self):
    sync(self)
    preparation.Preparation.sync, preparation.SYNC_SECONDS = sync, 1.0
    print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
    os.kill(os.getpid(), int(sys.argv[1]))

preparation.Preparation.sync, preparation.SYNC_SECONDS = sync_once, 0.0
main(["prepare", *sys.argv[2:]])
"""


def command_signalled_after_progress(number: int, *arguments: object) -> list[str]:
    """Return a command that prepares and sends itself a signal once its journal has advanced."""
    words = ["-c", SIGNALLED_AFTER_PROGRESS, str(number), *map(str, arguments)]
    return [sys.executable, *words]


def kill_after_progress(*arguments: object) -> None:
    command = command_signalled_after_progress(signal.SIGKILL, *arguments)
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == -signal.SIGKILL, done.stderr
    workers = [int(pid) for pid in done.stdout.splitlines()[-1].split()]
    assert len(workers) >= 2
    wait_until(lambda: not any(map(is_running, workers)))  # they exit with their parent


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_a_run_killed_repeatedly_equals_an_uninterrupted_one(tmp_path, sources, tokenizer):
    options = ["--tokenizer", tokenizer, "--shard_tokens", 300_000, "--workers", 2]
    whole = run(sources, "--out", tmp_path / "whole", *options)
    assert whole.returncode == 0, whole.stderr

    out = tmp_path / "broken"
    for _ in range(2):
        kill_after_progress(sources, "--out", out, *options)
        with pytest.raises(DataError, match="is not finished"):
            Corpus(out)
    other = run(sources, "--out", out, *options, "--validation", 0.5)
    assert other.returncode == 2
    assert "was made with --validation None, not 0.5" in other.stderr
    done = run(sources, "--out", out, *options)
    assert done.returncode == 0, done.stderr
    assert contents(out) == contents(tmp_path / "whole")
    Corpus(out).verify()


def test_the_result_does_not_depend_on_the_number_of_processes(tmp_path, sources, tokenizer):
    few = tmp_path / "few.jsonl"
    few.write_text("".join(sources.open().readlines()[:10]))
    for workers in (1, 3):
        done = run(
            few, "--out", tmp_path / f"{workers}", "--tokenizer", tokenizer, "--workers", workers
        )
        assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "1") == contents(tmp_path / "3")


def test_an_interrupted_run_resumes(tmp_path, sources, tokenizer):
    out = tmp_path / "out"
    options = ["--out", str(out), "--tokenizer", str(tokenizer), "--workers", "1"]
    command = command_signalled_after_progress(signal.SIGSTOP, sources, *options)
    running = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=take_interrupts,
    )
    stopped = psutil.Process(running.pid)
    if not wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED, running):
        raise AssertionError(running.communicate(timeout=LIMIT)[1])
    second = run(sources, *options)
    assert second.returncode == 2
    assert "is in use by another process" in second.stderr
    running.send_signal(signal.SIGINT)
    running.send_signal(signal.SIGCONT)
    assert running.communicate(timeout=LIMIT)[1] == "tokenformer prepare: interrupted\n"
    assert running.returncode == 130
    done = run(sources, *options)
    assert done.returncode == 0, done.stderr
    assert f"resuming {out}" in done.stdout
    Corpus(out).verify()


# Resets the high-water mark first: a child inherits that of its parent.
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
        timeout=LIMIT,
    )
    return int(done.stderr)


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """Eight times the text gives the same peak, for a single file and for rows."""
    block = np.random.default_rng(0).integers(97, 123, 1_000_000, dtype=np.uint8)
    block[::50] = 10
    row = json.dumps({"text": block.tobytes().decode()}).encode() + b"\n"
    for name, content in (("text", block.tobytes()), ("rows.jsonl", row)):
        peaks = []
        for megabytes in (4, 32):
            path = tmp_path / f"{megabytes}-{name}.gz"
            with gzip.open(path, "wb", compresslevel=1) as file:
                for _ in range(megabytes):
                    file.write(content)
            peaks.append(peak_memory(path, "--out", tmp_path / f"out-{megabytes}-{name}"))
        assert peaks[1] - peaks[0] < 15_000_000


def test_a_full_disk_is_a_one_line_error_and_the_run_resumes(tmp_path, sources, tokenizer):
    """A limit on file sizes simulates a full disk."""
    out = tmp_path / "out"
    limited = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000)); "
        "from tokenformer.cli import main; main(sys.argv[1:])"
    )
    arguments = ["prepare", sources, "--out", out, "--workers", "1"]
    done = subprocess.run(
        [sys.executable, "-c", limited, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"tokenformer prepare: --out {out} cannot be written: File too large; run the same command"
    )
    assert done.stderr.count("\n") == 1
    done = run(sources, "--out", out)
    assert done.returncode == 0, done.stderr
    Corpus(out).verify()


class Disk:
    """A small in-memory file system."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def mount(self, kilobytes: int, more: str = "") -> bool:
        options = f"{more}size={kilobytes}k"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.folder)]
        try:
            return subprocess.run(command, capture_output=True, timeout=LIMIT).returncode == 0
        except FileNotFoundError:
            return False

    def unmount(self) -> None:
        subprocess.run(["umount", str(self.folder)], check=True, timeout=LIMIT)


@pytest.fixture
def disk(tmp_path) -> Disk:
    disk = Disk(tmp_path / "disk")
    disk.folder.mkdir()
    if not disk.mount(1):
        pytest.skip("a small disk can be mounted by root on Linux alone")
    disk.unmount()
    return disk


def test_a_disk_that_fills_up_at_any_moment(tmp_path, disk, capsys):
    """From the journal, written first, to the index, written last."""
    text = tmp_path / "book.txt"
    text.write_text("It was a dark and stormy night.\n" * 600)
    assert run_here(text, "--out", tmp_path / "whole") == 0
    enough = False
    for kilobytes in range(4, 120, 8):
        assert disk.mount(kilobytes)
        try:
            out = disk.folder / "out"
            capsys.readouterr()
            enough = run_here(text, "--out", out) == 0
            said = capsys.readouterr().err
            if not enough:
                assert said.startswith(f"tokenformer prepare: --out {out} cannot be written: No sp")
                assert said.count("\n") == 1
                assert "Traceback" not in said
                with pytest.raises(DataError, match=r"not finished|no prepared corpus"):
                    Corpus(out)
                assert disk.mount(1000, "remount,")
                assert run_here(text, "--out", out) == 0
            assert contents(out) == contents(tmp_path / "whole")
        finally:
            disk.unmount()
        if enough:
            assert kilobytes > 40
            return
    raise AssertionError("120 kB are enough")


def test_a_full_disk_while_encoding_and_while_saving_a_tokenizer(
    tmp_path, disk, tokenizer, sources, capsys
):
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), eos_token="<|endoftext|>")
    fast.save_pretrained(tmp_path / "folder")
    for kilobytes, name in ((8, tmp_path / "folder"), (200, tokenizer)):
        assert disk.mount(kilobytes)
        try:
            out = disk.folder / "out"
            options = ["--tokenizer", name, "--workers", 2, "--documents", 40]
            assert run_here(sources, "--out", out, *options) == 2
            said = capsys.readouterr().err
            assert "cannot be written" in said
            assert "No space left" in said
            assert said.count("\n") == 1
        finally:
            disk.unmount()


def test_a_terminal_shows_a_progress_bar(tmp_path, sources):
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
    killer = threading.Timer(LIMIT, running.kill)
    killer.start()
    try:
        while block := os.read(primary, 4096):
            shown += block
    except OSError:  # the other end is closed
        pass
    os.close(primary)
    assert running.wait(timeout=LIMIT) == 0
    killer.cancel()
    assert "━".encode() in shown
    assert b"MB of text" in shown
