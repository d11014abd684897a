"""Chat templates, rendered in a child process with limits on time and memory.

A chat template is a program that comes with a model. Jinja's sandbox blocks files and the network,
but not infinite loops, `9 ** 9 ** 9`, which blocks all threads of a process, or huge allocations.
`ChatTemplate.render` therefore runs it in a child process (`template_process.py`) and kills the
child on a timeout; the next call starts another one.
"""

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenformer.serve.limits import API_KEY_VARIABLE
from tokenformer.serve.prompt import PromptError

PROGRAM = str(Path(__file__).with_name("template_process.py"))

START_SECONDS = 120.0
"""Timeout for the child to start, which takes one or two seconds."""


class ChatTemplate:
    def __init__(
        self, template: str, variables: dict[str, Any], timeout: float, max_characters: int
    ) -> None:
        self.setup = {
            "template": template,
            "variables": variables,
            "alarm": int(timeout) + 10,
            "max_characters": max_characters,
        }
        self.timeout = timeout
        self.child: subprocess.Popen[bytes] | None = None
        self.closed = False
        self.timed_out = False
        """Whether the last request hit the timeout."""

    def start(self) -> "subprocess.Popen[bytes]":
        """Start the child and wait until it is ready."""
        environment = {k: v for k, v in os.environ.items() if k != API_KEY_VARIABLE}
        self.child = subprocess.Popen(
            [sys.executable, PROGRAM],  # by its path: `-m` would import from the current folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment | {"OPENBLAS_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"},
        )
        if self.ask(self.child, self.setup, START_SECONDS) is None:
            raise RuntimeError("the process for chat templates does not start")
        return self.child

    def render(self, messages: list[dict[str, Any]]) -> str:
        """Return the prompt for these messages. Blocks; call it from one thread at a time."""
        child = self.child
        if child is None or child.poll() is not None:
            child = self.start()
        reply = self.ask(child, messages, self.timeout)
        if reply is None and self.timed_out:
            raise PromptError(f"the chat template did not finish within {self.timeout:g} seconds")
        if reply is None:
            raise PromptError(
                "the process that renders the chat template ended with exit code "
                f"{child.returncode}, for example because memory ran out; try again"
            )
        if "error" in reply:
            raise PromptError(f"the chat template refuses these messages: {reply['error']}")
        return str(reply["text"])

    def ask(
        self, child: "subprocess.Popen[bytes]", request: Any, seconds: float
    ) -> dict[str, Any] | None:
        """Return the child's reply; None if it exited or was killed on the timeout."""
        assert child.stdin is not None
        assert child.stdout is not None
        self.timed_out = False

        def time_out() -> None:
            self.timed_out = True
            child.kill()

        timer = threading.Timer(seconds, time_out)
        timer.daemon = True
        timer.start()
        line = b""
        try:
            if not self.closed:
                child.stdin.write(json.dumps(request).encode() + b"\n")
                child.stdin.flush()
                line = child.stdout.readline()
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            timer.cancel()
        if line.endswith(b"\n"):
            return dict(json.loads(line))
        self.reap()
        return None

    def kill(self) -> None:
        """Kill the child for good; a `render` in another thread returns at once."""
        self.closed = True
        if self.child is not None:
            self.child.kill()

    def reap(self) -> None:
        if self.child is None:
            return
        self.child.kill()
        self.child.wait()
        for pipe in (self.child.stdin, self.child.stdout):
            if pipe is not None:
                with suppress(OSError):  # buffered data that the dead child cannot read
                    pipe.close()
