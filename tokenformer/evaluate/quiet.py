"""lm-evaluation-harness at work without its log, its bars, or the processes it starts to resample:
a verb has a bar of its own, and what was asked for goes to standard output alone."""

import io
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

NO_PROCESSES = "DISABLE_MULTIPROC"
"""The variable by which lm-eval is told; forks of a process with a model in it are none of ours."""


@contextmanager
def quiet() -> Iterator[None]:
    logger, before = logging.getLogger("lm_eval"), os.environ.get(NO_PROCESSES)
    level = logger.level
    logger.setLevel(logging.ERROR)
    os.environ[NO_PROCESSES] = "1"
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
        if before is None:
            del os.environ[NO_PROCESSES]
        else:
            os.environ[NO_PROCESSES] = before
