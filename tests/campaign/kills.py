"""Kill a training process repeatedly and resume it: losses, model and checkpoints must be those of
an uninterrupted run, bit for bit."""

import os
import random
import signal
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from tests.campaign.moments import PHASES, Fault, watched
from tests.campaign.processes import SECONDS, Ended
from tests.campaign.runs import Reference, differences, start
from tests.campaign.trials import Outcome

AT_RANDOM = "at a random moment"
"""Killed from outside after a random time."""
MOST_KILLS = 10
"""Kills per run, at most."""


class Kills:
    name = "kills"

    def __init__(self, wanted: int, references: list[Reference]) -> None:
        self.wanted, self.references = wanted, references

    def planned(self) -> int:
        return 4 * self.wanted + 4

    def trial(self, index: int, chance: random.Random, place: Path) -> Outcome:
        if index == 0:
            return compare_with_subprocess(self.references[0], place)
        reference = self.references[index % len(self.references)]
        run, log = place / "run", place / "log"
        phases: list[str] = []
        for kill in range(chance.randint(1, MOST_KILLS)):
            phase, ended = attempt(reference, run, log, chance, first=kill == 0)
            if not ended.killed:
                return judge(ended, run, reference, phases)
            phases.append(phase)
        return judge(
            start(reference.recipe, run, log, around=nullcontext).end(), run, reference, phases
        )


def attempt(
    reference: Reference, run: Path, log: Path, chance: random.Random, *, first: bool
) -> tuple[str, Ended]:
    """Train until killed in a random phase or finished."""
    here = [p for p in PHASES if reference.counts.get(p) and not (first and p == "load")]
    phase = chance.choice([*here, AT_RANDOM, AT_RANDOM])
    if phase == AT_RANDOM:
        child = start(reference.recipe, run, log, around=nullcontext)
        if not child.wait(chance.uniform(0.0, reference.seconds)):
            child.kill()
        return phase, child.end()
    fault = random_fault(phase, reference.counts[phase], chance, first=first)
    return phase, start(reference.recipe, run, log, around=partial(watched, run, fault)).end()


def random_fault(
    phase: str, count: int, chance: random.Random, *, first: bool, number: int = signal.SIGKILL
) -> Fault:
    """Choose a random moment; a resumed run has fewer left, so an early one."""
    return Fault(
        phase,
        chance.randint(1, count if first else max(1, count // 4)),
        signal=number,
        delay=chance.choice([0.0, 0.0, chance.uniform(0.0, 0.02)]),
        share=chance.random(),
    )


def judge(
    ended: Ended, run: Path, reference: Reference, phases: list[str], *, stopped: bool = False
) -> Outcome:
    """Return the outcome of a run that was resumed to its end."""
    if ended.code:
        word = ended.overrun or "not resumed"
        return Outcome(False, word, phases, f"{reference.recipe.stem}: {ended.output[-1500:]}")
    if found := differences(run, reference, stopped=stopped):
        return Outcome(False, "differs", phases, f"{reference.recipe.stem}: {'; '.join(found[:5])}")
    return Outcome(True, "bit-equal", phases)


def compare_with_subprocess(reference: Reference, place: Path) -> Outcome:
    """Check that a forked process trains the same bits as a new one."""
    run = place / "run"
    command = [sys.executable, "-m", "tokenformer", "train", str(reference.recipe)]
    done = subprocess.run(
        [*command, "--out", str(run)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    ended = Ended(done.returncode, done.stdout + done.stderr, 0.0, 0)
    return judge(ended, run, reference, [])
