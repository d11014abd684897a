"""Ctrl-C while modules are imported, which takes most of the time of a short command.

KeyboardInterrupt is no good there: extension modules abort or swallow it, and after one inside
`exec`, which dataclasses use, Python ends with the signal instead of the exit code.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from tokenformer.files import OPEN, discard_folder

INTERRUPTED = 130
"""Exit code of a process ended by SIGINT, as shells report it: 128 + 2."""
IMPORTER = "<frozen importlib._bootstrap>"


@contextmanager
def exit_in_imports(command: str) -> Iterator[None]:
    """End the process at once if Ctrl-C comes during an import; else raise KeyboardInterrupt."""

    def handle(number: int, frame: FrameType | None) -> None:
        if not is_importing(frame):
            raise KeyboardInterrupt
        for folder in list(OPEN):
            discard_folder(folder)
        with suppress(Exception):  # the interrupt may have come while it was being written
            sys.stdout.flush()
        os.write(2, f"{command}: interrupted\n".encode())
        os._exit(INTERRUPTED)

    on_main_thread = threading.current_thread() is threading.main_thread()
    if not on_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_importing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != IMPORTER:
        frame = frame.f_back
    return frame is not None
