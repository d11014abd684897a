"""Ctrl-C that is not lost.

Python ignores an exception that is raised inside a weakref callback or `__del__`, and thread pools,
progress bars and file objects have those. A KeyboardInterrupt that falls into one disappears.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def kept_interrupts() -> Iterator[Callable[[], None]]:
    """Within the block Ctrl-C raises KeyboardInterrupt as always. If Python ignores it, the
    function given raises it again when it is next called, and so does the end of the block."""
    pending = False

    def handle(number: int, frame: Any) -> None:
        nonlocal pending
        pending = True
        raise KeyboardInterrupt

    def check() -> None:
        if pending:
            raise KeyboardInterrupt

    on_main_thread = threading.current_thread() is threading.main_thread()
    if not on_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield check
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield check
        check()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
