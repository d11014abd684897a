"""Ctrl-C, SIGTERM and closed pipes at random moments: no traceback, the exit code that shells
expect, and work that can be resumed."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from tests.campaign.kills import judge as judge_run
from tests.campaign.kills import random_fault
from tests.campaign.moments import PHASES, watched
from tests.campaign.processes import SECONDS, Ended, Limits, tokenformer
from tests.campaign.runs import Reference, demand, start
from tests.campaign.trials import Outcome

MOST_SIGNALS = 3
TEXT_BYTES = 6_000_000
SLACK = 60.0
"""Seconds a command may take to end after a signal on a busy machine."""


class Signals:
    name = "signals"

    def __init__(self, wanted: int, references: list[Reference], corpus: Path) -> None:
        self.wanted, self.references, self.corpus = wanted, references, corpus
        self.text, self.prepared, self.seconds = prepare_text(corpus.parent)
        self.kinds = [self.train, self.command, self.train, self.prepare, self.train, self.fresh]

    def planned(self) -> int:
        return 4 * self.wanted + 4

    def trial(self, index: int, chance: random.Random, place: Path) -> Outcome:
        return self.kinds[index % len(self.kinds)](index, chance, place)

    def train(self, index: int, chance: random.Random, place: Path) -> Outcome:
        """Stop a run up to three times: it must end like an uninterrupted one."""
        reference = self.references[index % len(self.references)]
        run, log = place / "run", place / "log"
        done: list[str] = []
        for turn in range(chance.randint(1, MOST_SIGNALS)):
            number = chance.choice([signal.SIGINT, signal.SIGTERM])
            counts = reference.counts
            phase = chance.choice([p for p in PHASES if counts.get(p) and (turn or p != "load")])
            fault = random_fault(phase, counts[phase], chance, first=not turn, number=number)
            ended = start(reference.recipe, run, log, around=partial(watched, run, fault)).end()
            if ended.code == 0:
                return judge_run(ended, run, reference, done, stopped=True)
            done.append(f"{number.name} in train")
            if problem := unclean(ended, number):
                return Outcome(False, problem, done, f"{phase}: {ended.output[-1500:]}")
        ended = start(reference.recipe, run, log, around=nullcontext).end()
        return judge_run(ended, run, reference, done, stopped=True)

    def command(self, index: int, chance: random.Random, place: Path) -> Outcome:
        """Interrupt a command that reads a model."""
        model = str(chance.choice(self.references).run / "model")
        verb, seconds = chance.choice([("generate", 3.0), ("evaluate", 3.0), ("serve", 6.0)])
        arguments = {
            "generate": ["generate", model, "--prompt", "key", "--max_new_tokens", "400"],
            "evaluate": ["evaluate", model, "--perplexity", str(self.corpus), "--length", "16"],
            "serve": ["serve", model, "--port", "0"],
        }[verb]
        ended = interrupted(arguments, place / "log", seconds * chance.random() ** 2)
        label = [f"SIGINT in {verb}"]
        if problem := unclean(ended, signal.SIGINT):
            return Outcome(False, problem, label, ended.output[-1500:])
        return Outcome(True, "finished before" if ended.code == 0 else "interrupted", label)

    def prepare(self, index: int, chance: random.Random, place: Path) -> Outcome:
        """Interrupt `prepare` and run it again: it must write the same shards."""
        out, label = place / "corpus", ["SIGINT in prepare"]
        arguments = ["prepare", str(self.text), "--out", str(out), "--workers", "1"]
        ended = interrupted(arguments, place / "log", chance.uniform(0.0, self.seconds))
        if problem := unclean(ended, signal.SIGINT):
            return Outcome(False, problem, label, ended.output[-1500:])
        if ended.code:
            again = tokenformer(arguments, place / "log").end()
            if again.code:
                return Outcome(False, "not resumed", label, again.output[-1500:])
        if shards(out) != shards(self.prepared):
            return Outcome(False, "other shards", label, str(shards(out)))
        return Outcome(True, "finished before" if ended.code == 0 else "same shards", label)

    def fresh(self, index: int, chance: random.Random, place: Path) -> Outcome:
        """Interrupt a new interpreter while it imports, or close its output."""
        model = str(self.references[0].run / "model")
        command = [sys.executable, "-m", "tokenformer", "generate", model, "--prompt", "key"]
        if index // len(self.kinds) % 2:
            return closed_pipe([*command, "--max_new_tokens", "400"], chance)
        label = ["SIGINT while importing"]
        running = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            running.wait(chance.uniform(0.3, 6.0))
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGINT)
        ended = Ended(*finish(running), 0.0, 0)
        if problem := unclean(ended, signal.SIGINT):
            return Outcome(False, problem, label, ended.output[-1500:])
        return Outcome(True, "finished before" if ended.code == 0 else "interrupted", label)


def prepare_text(folder: Path) -> tuple[Path, Path, float]:
    """Return a text that takes a while to prepare, its corpus, and the seconds it took."""
    text, prepared, facts = folder / "long.txt", folder / "prepared", folder / "prepared.json"
    if not facts.exists():
        shutil.rmtree(prepared, ignore_errors=True)
        line = " ".join(random.Random(0).choices(["token", "key", "value", "\n"], k=1000))
        text.write_text(line * (TEXT_BYTES // len(line)))
        arguments = ["prepare", str(text), "--out", str(prepared), "--workers", "1"]
        ended = tokenformer(arguments, folder / "prepared.log").end()
        demand(ended, "prepare")
        facts.write_text(json.dumps(ended.seconds))
    return text, prepared, float(facts.read_text())


def interrupted(arguments: list[str], log: Path, seconds: float) -> Ended:
    """Run a command that gets SIGINT after `seconds`."""
    child = tokenformer(arguments, log, limits=Limits(seconds=seconds + SLACK))
    if not child.wait(seconds):
        child.kill(signal.SIGINT)
    return child.end()


def closed_pipe(command: list[str], chance: random.Random) -> Outcome:
    """Close the pipe after a few bytes, as `| head -c 5` does."""
    label = ["closed pipe"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None
    os.read(running.stdout.fileno(), chance.choice([1, 5, 20]))
    running.stdout.close()
    running.stdout = None
    code, errors = finish(running)
    ended = Ended(code, errors, 0.0, 0)
    if code not in (0, 1, 128 + signal.SIGPIPE, -signal.SIGPIPE) or "Error" in errors:
        return Outcome(False, f"ended with {code}", label, ended.output[-1500:])
    return Outcome(True, "ended quietly", label)


def finish(running: "subprocess.Popen[str]") -> tuple[int, str]:
    try:
        errors = running.communicate(timeout=SECONDS)[1]
    except subprocess.TimeoutExpired:
        running.kill()
        errors = running.communicate()[1] + "\nit hung"
    return running.returncode, errors


def unclean(ended: Ended, number: int) -> str:
    """Return what is wrong with how a process ended at a signal; empty if nothing is."""
    if ended.overrun:
        return ended.overrun
    # Before the package is reached, Python itself speaks.
    if ended.has_traceback and "/tokenformer/" in ended.output:
        return "traceback"
    if ended.code not in (0, 128 + number, -number):
        return f"ended with {ended.code}"
    return ""


def shards(corpus: Path) -> object:
    return json.loads((corpus / "index.json").read_text())["splits"]
