"""How a process ends when its output is cut off, or when it is interrupted."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SECONDS = 300
"""Long enough on any machine: what is waited for comes within seconds."""


def start(*words: object, **options: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tokenformer", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def test_output_that_nobody_reads_ends_it_quietly():
    process = start("--help")
    assert process.stdout
    assert process.stderr
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(SECONDS) == 141


def test_a_stream_that_is_cut_off_ends_generation(parrot: Path):
    """As `| head -c 5` does: it would go on for minutes."""
    process = start("generate", parrot, "--prompt", "Say", "--max_new_tokens", 10**6)
    assert process.stdout
    assert process.stderr
    assert process.stdout.read(5).startswith(b"Say")
    process.stdout.close()
    told = process.stderr.read().decode()
    assert process.wait(SECONDS) == 141
    assert told.count("\n") == 1, told
    assert "the window slides" in told


@pytest.mark.parametrize("seconds", [0.0, 0.3, 1.0])
def test_an_interrupt_while_it_imports_is_one_line(seconds, parrot: Path):
    """From the first import of the command itself, some 50 ms after the start of Python."""
    words = ["generate", str(parrot), "--prompt", "Say", "--max_new_tokens", str(10**6)]
    command = [sys.executable, "-X", "importtime", "-m", "tokenformer", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr
    while b"jsonargparse" not in (line := process.stderr.readline()):
        assert line, "it ended before"
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=SECONDS)
    told = [line for line in rest.decode().splitlines() if not line.startswith("import time:")]
    assert process.returncode == 130, told
    assert told[-1] == "tokenformer generate: interrupted"
    assert not any("Traceback" in line for line in told)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["--help", "inspect 124m"])
def test_output_that_cannot_be_written_is_one_line(words, unbuffered):
    with open("/dev/full", "w") as full:  # noqa: PTH123
        process = subprocess.run(
            [sys.executable, "-m", "tokenformer", *words.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=SECONDS,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert process.returncode == 1
    assert process.stderr.count("\n") == 1
    assert "the output cannot be written: No space left on device" in process.stderr


def test_closed_streams_are_no_error():
    command = f"{sys.executable} -m tokenformer --version >&- && "
    command += f"{sys.executable} -m tokenformer bogus >&- 2>&-"
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.stderr == ""
    assert done.returncode == 2, "that of the second"
