"""How a process ends when its output is cut off, or when it is interrupted."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.commands import COMMAND
from tests.support.processes import LIMIT, started

PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def test_output_that_nobody_reads_ends_it_quietly():
    with started([*COMMAND, "--help"], **PIPES) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(LIMIT) == 141


def test_a_stream_that_is_cut_off_ends_generation(parrot: Path):
    """As `| head -c 5` does: it would take minutes otherwise."""
    words = ["generate", str(parrot), "--prompt", "Say", "--max_new_tokens", str(10**6)]
    with started([*COMMAND, *words], **PIPES) as process:
        assert process.stdout.read(5).startswith(b"Say")
        process.stdout.close()
        errors = process.stderr.read().decode()
        assert process.wait(LIMIT) == 141
    assert errors.count("\n") == 1, errors
    assert "the window slides" in errors


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "seconds", [pytest.param(0.0, marks=SLOW), 0.3, pytest.param(1.0, marks=SLOW)]
)
def test_an_interrupt_while_it_imports_is_one_line(seconds, parrot: Path):
    """From the first import of the command itself, some 50 ms after the start of Python."""
    words = ["generate", str(parrot), "--prompt", "Say", "--max_new_tokens", str(10**6)]
    command = [sys.executable, "-X", "importtime", "-m", "tokenformer", *words]
    with started(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        while b"jsonargparse" not in (line := process.stderr.readline()):
            assert line, "it ended before"
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=LIMIT)
    errors = [line for line in rest.decode().splitlines() if not line.startswith("import time:")]
    assert process.returncode == 130, errors
    assert errors[-1] == "tokenformer generate: interrupted"
    assert not any("Traceback" in line for line in errors)


INTERRUPT = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print(end='')"
IMPORTS = {
    "a dataclass is made by exec": f'exec("{INTERRUPT}")\n',
    "a library goes on without": f"try:\n    {INTERRUPT}\nexcept BaseException:\n    pass\n",
    "an error replaces it": f"try:\n    {INTERRUPT}\nfinally:\n    raise ImportError('broken')\n",
}


@pytest.mark.parametrize("statements", IMPORTS.values(), ids=IMPORTS)
def test_an_interrupt_in_any_import_ends_it(statements, tmp_path: Path):
    (tmp_path / "library.py").write_text(statements)
    (tmp_path / "interrupted.py").write_text(
        "from pathlib import Path\n"
        "from tokenformer import cli, files\n"
        "def command():\n"
        "    print('begun')\n"
        "    with files.new_folder('--out', Path('kept')):\n"
        "        import library\n"
        "cli.COMMANDS['demo'] = 'interrupted:command'\n"
        "if __name__ == '__main__':\n"
        "    cli.main(['demo'])\n"
    )
    command = [sys.executable, "-m", "interrupted"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.stderr == "tokenformer demo: interrupted\n"
    assert done.stdout == "begun\n"
    assert done.returncode == 130
    left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert left == {"library.py", "interrupted.py"}


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["--help", "inspect 124m"])
def test_output_that_cannot_be_written_is_one_line(words, unbuffered):
    with open("/dev/full", "w") as full:  # noqa: PTH123
        process = subprocess.run(
            [sys.executable, "-m", "tokenformer", *words.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=LIMIT,
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
        ["sh", "-c", command], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.stderr == ""
    assert done.returncode == 2, "that of the second"
