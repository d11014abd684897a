"""Run commands in forked processes, which saves the seconds of imports.

The campaign imports torch and tokenformer once, stays single-threaded and runs no tensor operation
itself, so that a fork is like a new interpreter after its imports. `kills` checks this against
`python -m tokenformer train`.
"""

import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

SECONDS = 180.0
"""Time limit of one process on a busy machine; a whole run takes about a second."""
LARGEST_FILE = 1 << 28
"""No process of the campaign may write a larger file."""

Around = Callable[[], AbstractContextManager[None]]


@dataclass
class Ended:
    """How a process ended."""

    code: int
    """As in subprocess: negative for the signal that ended it."""
    output: str
    """Standard output and error."""
    seconds: float
    memory: int
    """Peak resident memory in bytes."""
    overrun: str = ""
    """The limit at which it was killed: seconds or disk."""

    @property
    def has_traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.output

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL and not self.overrun

    def describe(self) -> str:
        last = self.output.strip().splitlines()[-1:] or ["no output"]
        return f"{self.overrun or self.code}: {last[0][:300]}"


@dataclass
class Limits:
    seconds: float = SECONDS
    memory: int | None = None
    """Bytes of address space beyond those at its start."""
    disk: int | None = None
    """Bytes in `folder`."""
    folder: Path = field(default_factory=Path)


class Child:
    """A forked process that runs `function`, its output in a file of its own."""

    def __init__(
        self,
        function: Callable[[], None],
        log: Path,
        *,
        around: Around = nullcontext,
        environment: dict[str, str] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.log, self.limits = log, limits or Limits()
        sys.stdout.flush()
        sys.stderr.flush()
        self.began = time.monotonic()
        self.pid = os.fork()
        if not self.pid:
            become(function, log, around, environment or {}, self.limits)
        self.handle = os.pidfd_open(self.pid)

    def kill(self, number: int = signal.SIGKILL) -> None:
        signal.pidfd_send_signal(self.handle, number)

    def wait(self, seconds: float) -> bool:
        """Return whether it ends within `seconds`."""
        return bool(select.select([self.handle], [], [], max(0.0, seconds))[0])

    def end(self) -> Ended:
        """Wait for its end; kill it at a limit."""
        overrun = ""
        while not self.wait(0.25 if self.limits.disk else self.left()):
            if self.limits.disk and size_of(self.limits.folder) > self.limits.disk:
                overrun = "too much disk"
            elif self.left() <= 0:
                overrun = "too many seconds"
            if overrun:
                self.kill()
                break
        _, status, usage = os.wait4(self.pid, 0)
        os.close(self.handle)
        return Ended(
            code=os.waitstatus_to_exitcode(status),
            output=self.log.read_text(errors="replace") if self.log.exists() else "",
            seconds=time.monotonic() - self.began,
            memory=usage.ru_maxrss * 1024,
            overrun=overrun,
        )

    def left(self) -> float:
        return self.began + self.limits.seconds - time.monotonic()


def become(
    function: Callable[[], None],
    log: Path,
    around: Around,
    environment: dict[str, str],
    limits: Limits,
) -> None:
    """Run a function in a forked process; never returns."""
    code = 1
    try:
        redirect(log)
        os.environ.update(environment)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
        if limits.memory is not None:
            most = address_space() + limits.memory
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        with around():
            signal.signal(signal.SIGINT, signal.default_int_handler)
            function()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def redirect(log: Path) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for source, target in ((nothing, 0), (written, 1), (written, 2)):
        os.dup2(source, target)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def size_of(folder: Path) -> int:
    """Return the bytes of all files below a folder, some of which may be deleted meanwhile."""
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(base, name)).st_blocks * 512  # noqa: PTH118
            except OSError:
                continue
    return total


def tokenformer(
    arguments: Sequence[str],
    log: Path,
    *,
    around: Around = nullcontext,
    environment: dict[str, str] | None = None,
    limits: Limits | None = None,
) -> Child:
    """Run `tokenformer ARGUMENTS` in a forked process."""

    def command() -> None:
        from tokenformer.cli import main

        sys.argv = ["tokenformer", *arguments]
        main(list(arguments))

    return Child(command, log, around=around, environment=environment, limits=limits)
