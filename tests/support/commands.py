"""The command `tokenformer` in tests: as a process, and in this process."""

import os
import subprocess
import sys
from typing import Any

import pytest

from tokenformer.cli import main

COMMAND = (sys.executable, "-m", "tokenformer")
LIMIT = 900
"""Seconds, far above what a busy machine needs."""


def run_command(
    *arguments: object, environment: dict[str, str] | None = None, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Run a command in a process of its own and return its exit code and output."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        **options,
    )


def error_line(arguments: list[Any], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must refuse its input with exit code 2; return its one line of error."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert end.value.code == 2
    assert out == ""
    assert err.count("\n") == 1
    return err
