"""Moments at which a training process can be killed, by phase.

A moment is an event that Python audits (a file opened, renamed or removed), an fsync, a tensor file
half written, or the start or end of an optimizer step. Phases are recognized by paths on disk and
public hooks of torch, not by names in the package, so the package's code can change.
"""

import json
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PHASES = (
    "start",
    "load",
    "step",
    "metrics",
    "checkpoint tensors",
    "checkpoint files",
    "checkpoint fsync",
    "checkpoint rename",
    "prune",
    "export",
    "growth",
    "end",
)
FILE_EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate")


@dataclass(frozen=True)
class Fault:
    """A signal or kill, and the moment it happens."""

    phase: str
    count: int
    """Number of the moment within the phase, counted from 1 in this process."""
    signal: int = signal.SIGKILL
    delay: float = 0.0
    """Delay in seconds."""
    share: float = 0.5
    """Share of a tensor file that is written before the kill."""

    def strike(self) -> None:
        if self.delay:
            threading.Thread(target=self.later, daemon=True).start()
        else:
            os.kill(os.getpid(), self.signal)

    def later(self) -> None:
        time.sleep(self.delay)
        os.kill(os.getpid(), self.signal)


class Moments:
    """Counts the moments of a process that trains in `run`, and triggers the fault at one."""

    def __init__(self, run: Path, fault: Fault | None = None) -> None:
        self.run, self.fault = str(run), fault
        self.counts: Counter[str] = Counter()
        self.stepped = False
        self.busy = threading.local()

    def reach(self, phase: str | None) -> None:
        if phase is None:
            return
        self.counts[phase] += 1
        fault = self.fault
        if fault is not None and fault.phase == phase and fault.count == self.counts[phase]:
            fault.strike()

    def phase_of(self, event: str, path: str) -> str | None:
        """Return the phase of a file event; None for files outside the run."""
        if not path.startswith(self.run):
            return None if self.stepped else "start" if event == "open" else None
        name = path[len(self.run) :].lstrip("/")
        if name.startswith(("model", ".model.")):
            return "export"
        if name.startswith("growth-"):
            return "growth"
        if name.startswith("loss"):
            return "end"
        if "metrics.jsonl" in name:
            return "metrics"
        if ".deleted-" in name:
            return "prune"
        if re.search(r"\.step-\d+\.unfinished-", name):
            kinds = {"os.rename": "rename", "fsync": "fsync", "tensors": "tensors"}
            return f"checkpoint {kinds.get(event, 'files')}"
        if name.startswith("checkpoints/step-"):
            if event == "os.rename":
                return "prune"
            if not self.stepped:
                return "load"
            return None if name.endswith("manifest.json") else "growth"  # prune reads manifests
        return None if self.stepped else "start"

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "ctypes.dlsym" and arguments[1] == "renameat2":
            self.reach("export")  # an older export is about to give way
        if event not in FILE_EVENTS or getattr(self.busy, "now", False):
            return
        self.busy.now = True
        try:
            path = arguments[0]
            if isinstance(path, str | bytes | os.PathLike):
                path = os.fsdecode(path)
                if event in ("os.remove", "os.rmdir") and arguments[1] >= 0:
                    path = f"{name_of(arguments[1])}/{path}"
                self.reach(self.phase_of(event, absolute(path)))
        finally:
            self.busy.now = False

    def fsync(self, original: Callable[[int], None]) -> Callable[[int], None]:
        def fsync(handle: int) -> None:
            self.reach(self.phase_of("fsync", name_of(handle)))
            original(handle)

        return fsync

    def serialize(self, original: Callable[..., None]) -> Callable[..., None]:
        def serialize_file(tensors: Any, path: Any, *rest: Any, **named: Any) -> None:
            original(tensors, path, *rest, **named)
            file = absolute(os.fsdecode(path))
            fault, phase = self.fault, self.phase_of("tensors", file)
            hit = fault and phase == fault.phase and self.counts[phase] + 1 == fault.count
            if fault and hit and fault.signal == signal.SIGKILL:
                os.truncate(file, int(Path(file).stat().st_size * fault.share))
                os.kill(os.getpid(), signal.SIGKILL)
            self.reach(phase)

        return serialize_file

    def step(self, *_: Any) -> None:
        self.stepped = True
        self.reach("step")


def name_of(handle: int) -> str:
    """Return the path of an open file or folder."""
    return str(Path(f"/proc/self/fd/{handle}").readlink())


def absolute(path: str) -> str:
    return path if path.startswith("/") else f"{Path.cwd()}/{path}"


@contextmanager
def watched(run: Path, fault: Fault | None = None, counts: Path | None = None) -> Iterator[None]:
    """Trigger a fault within the block, or write the number of moments by phase to `counts`. Needs
    a process of its own: an audit hook cannot be removed."""
    import safetensors.torch
    import torch
    from torch.optim import optimizer as hooks

    moments = Moments(run, fault)
    os.fsync = moments.fsync(os.fsync)  # type: ignore[assignment]
    original = safetensors.torch.serialize_file
    safetensors.torch.serialize_file = moments.serialize(original)
    backward = torch.Tensor.backward

    def before_backward(*arguments: Any, **named: Any) -> Any:
        moments.step()
        return backward(*arguments, **named)

    torch.Tensor.backward = before_backward  # type: ignore[method-assign]
    hooks.register_optimizer_step_pre_hook(moments.step)
    hooks.register_optimizer_step_post_hook(moments.step)
    sys.addaudithook(moments.audit)
    yield
    if counts is not None:
        counts.write_text(json.dumps(moments.counts))
