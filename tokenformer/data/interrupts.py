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
    pending = False

    def handle(number: int, frame: Any) -> None:
        nonlocal pending
        pending = True
        raise KeyboardInterrupt

    def check() -> None:
        if pending:
            raise KeyboardInterrupt

    on_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    if not on_main_thread or not callable(before):
        yield check
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield check
        check()
    finally:
        signal.signal(signal.SIGINT, before)
