"""Ctrl-C that is never lost.

Python ignores an exception raised inside a weakref callback or `__del__`, which thread pools,
progress bars and file objects have. A KeyboardInterrupt raised there disappears.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def reraise_lost_interrupts() -> Iterator[Callable[[], None]]:
    """Raise KeyboardInterrupt again if Python ignored it.

    Ctrl-C raises KeyboardInterrupt as usual. If that was ignored, the next call of the yielded
    function raises it again, and so does the end of the block.
    """
    pending, before = False, signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: Any) -> None:
        nonlocal pending
        try:
            before(number, frame)  # type: ignore[operator,misc]
        except KeyboardInterrupt:
            pending = True
            raise

    def check() -> None:
        if pending:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield check
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield check
        check()
    finally:
        signal.signal(signal.SIGINT, before)
