"""Trials: each in its own process and folder, several at a time, with limits of time and disk.
Results are appended to a file; trials that it holds are not repeated."""

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tests.campaign.processes import size_of

TRIAL_SECONDS = 900.0
FOLDERS_KEPT = 5
"""Folders of failed trials to keep for inspection."""


@dataclass
class Outcome:
    """The outcome of a trial."""

    ok: bool
    outcome: str
    """One or two words, counted in the summary."""
    phases: list[str] = field(default_factory=list)
    """The phase of each kill, or the kind of damage."""
    detail: str = ""


@dataclass
class Result(Outcome):
    part: str = ""
    index: int = 0
    seed: int = 0
    seconds: float = 0.0


class Part(Protocol):
    """One kind of trial. `trial` runs in its own process; its only randomness is `chance`."""

    name: str
    wanted: int
    """Number of phases to count, or 0."""

    def trial(self, index: int, chance: random.Random, place: Path) -> Outcome: ...

    def planned(self) -> int:
        """Return the maximum number of trials for `wanted`."""
        ...


class Running:
    def __init__(self, part: Part, index: int, seed: int, folder: Path) -> None:
        self.part, self.index, self.seed = part, index, seed
        self.place = folder / f"{part.name}-{index}"
        self.began = time.monotonic()
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir(parents=True)
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            self.live()

    def live(self) -> None:
        """Run the trial in the forked process and write its outcome; never returns."""
        os.setsid()  # so that all its processes can be ended together
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            chance = random.Random(f"{self.seed}:{self.part.name}:{self.index}")
            found = self.part.trial(self.index, chance, self.place)
        except BaseException:
            found = Outcome(False, "the trial failed", [], traceback.format_exc()[-3000:])
        (self.place / "outcome.json").write_text(json.dumps(asdict(found)))
        os._exit(0)

    def poll(self) -> Result | None:
        """Return the result once the trial has ended or timed out."""
        late = time.monotonic() - self.began > TRIAL_SECONDS
        if not late and not os.waitpid(self.pid, os.WNOHANG)[0]:
            return None
        self.stop(reap=late)
        try:
            found = json.loads((self.place / "outcome.json").read_text())
        except (OSError, ValueError):
            word = "out of time" if late else "the trial died"
            found = asdict(Outcome(False, word))
        return Result(
            **found,
            part=self.part.name,
            index=self.index,
            seed=self.seed,
            seconds=round(time.monotonic() - self.began, 2),
        )

    def stop(self, reap: bool) -> None:
        """Kill the remaining processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if reap:
            os.waitpid(self.pid, 0)


class Campaign:
    """Runs the trials of all parts; results go to `out`/results.jsonl."""

    def __init__(
        self,
        out: Path,
        *,
        seed: int,
        workers: int,
        max_disk: int,
        max_seconds: float | None,
        tell: Callable[[str], None],
    ) -> None:
        self.out, self.seed, self.workers, self.max_disk = out, seed, workers, max_disk
        self.deadline = None if max_seconds is None else time.monotonic() + max_seconds
        self.tell = tell
        self.file = out / "results.jsonl"
        self.results = read_results(self.file)
        self.stopped = ""
        """Why the campaign stopped early."""

    def of(self, part: Part) -> list[Result]:
        return [r for r in self.results if r.part == part.name and r.seed == self.seed]

    def run(self, part: Part) -> None:
        """Run the missing trials of a part."""
        active: list[Running] = []
        done = {result.index for result in self.of(part)}
        try:
            while True:
                counted = sum(len(result.phases) for result in self.of(part))
                waiting = [i for i in range(part.planned()) if i not in done]
                while waiting and len(active) < self.workers and self.may_go_on():
                    if counted + len(active) >= part.wanted:
                        break
                    index = waiting.pop(0)
                    done.add(index)
                    active.append(Running(part, index, self.seed, self.out / "trials"))
                if not active:
                    return
                time.sleep(0.02)
                for running in [*active]:
                    if (result := running.poll()) is not None:
                        active.remove(running)
                        self.keep(running, result)
        finally:
            for running in active:
                running.stop(reap=True)
                shutil.rmtree(running.place, ignore_errors=True)

    def only(self, part: Part, index: int) -> None:
        """Repeat one trial, for inspection."""
        running = Running(part, index, self.seed, self.out / "trials")
        while (result := running.poll()) is None:
            time.sleep(0.02)
        self.results = [result]
        self.show(result)
        self.tell(f"its folder: {running.place}")

    def may_go_on(self) -> bool:
        if self.deadline is not None and time.monotonic() > self.deadline:
            self.stopped = "--max_seconds are over"
        elif size_of(self.out) > self.max_disk:
            self.stopped = "--max_disk is reached"
        return not self.stopped

    def keep(self, running: Running, result: Result) -> None:
        self.results.append(result)
        with self.file.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        failed = self.out / "failed"
        if not result.ok and len([*failed.glob("*")]) < FOLDERS_KEPT:
            failed.mkdir(exist_ok=True)
            shutil.rmtree(failed / running.place.name, ignore_errors=True)
            shutil.move(running.place, failed)
        shutil.rmtree(running.place, ignore_errors=True)
        self.show(result)

    def show(self, result: Result) -> None:
        mine = [r for r in self.results if r.part == result.part and r.seed == self.seed]
        count = sum(len(r.phases) for r in mine)
        failed = sum(not r.ok for r in mine)
        self.tell(
            f"{result.part} {result.index}: {result.outcome} "
            f"[{', '.join(result.phases)}] {result.seconds:.1f} s; {count} so far, {failed} failed"
            + ("" if result.ok else f"\n  FAILED: {result.detail}")
        )


def read_results(file: Path) -> list[Result]:
    """Return finished trials, without a truncated last line."""
    if not file.exists():
        return []
    known: list[Result] = []
    for line in file.read_text().splitlines():
        try:
            fields: dict[str, Any] = json.loads(line)
        except ValueError:
            continue
        known.append(Result(**fields))
    return known
