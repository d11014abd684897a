"""Files damaged on disk: checkpoints of a run, exported models, prepared corpora.

A run must skip a damaged checkpoint and end, from the one before, like an uninterrupted run; if all
are damaged it must fail and leave its folder unchanged. A damaged model or corpus must be refused
with one line, or make no difference.
"""

import hashlib
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from tests.campaign import damage
from tests.campaign.damage import Damage
from tests.campaign.processes import Ended, Limits, tokenformer
from tests.campaign.runs import Reference, Subject, differences, start
from tests.campaign.trials import Outcome

SHARD = "*.safetensors"
CHECKPOINT_FILES = (SHARD, "state.json", "manifest.json")
MODEL_FILES = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json")
CORPUS_FILES = ("index.json", "train-00000.bin", "validation-00000.bin")
UNSEEN_IN_CORPORA = ("bit flipped", "zeros inside", "random bytes", "swapped with a sibling")
"""Training checks the sizes of shards, not their hashes (`Corpus.verify` does)."""
PROMPT = ("--prompt", "key value", "--max_new_tokens", "8", "--greedy")

Case = Callable[[random.Random, Path], Outcome]


class Corruptions:
    name = "corruptions"

    def __init__(self, wanted: int, references: list[Reference], corpus: Path) -> None:
        self.wanted, self.corpus = wanted, corpus
        self.subjects = [Subject.of(reference) for reference in references]
        self.cases = [*self.all_cases()]

    def planned(self) -> int:
        return self.wanted

    def trial(self, index: int, chance: random.Random, place: Path) -> Outcome:
        return self.cases[index % len(self.cases)](chance, place)

    def all_cases(self) -> Iterator[Case]:
        """Yield each kind in turn, so that a short campaign covers all."""
        checkpoints: list[Case] = [
            partial(self.newest, name, word)
            for name in CHECKPOINT_FILES
            for word in kinds_for(name)
        ]
        checkpoints += [partial(self.newest, "", word) for word in damage.WHOLE]
        models: list[Case] = [
            partial(self.model, name, word) for name in MODEL_FILES for word in kinds_for(name)
        ]
        corpora: list[Case] = [
            partial(self.broken_corpus, name, word)
            for name in CORPUS_FILES
            for word in kinds_for(name)
            if word not in UNSEEN_IN_CORPORA
        ]
        every: list[Case] = [self.every_checkpoint] * (len(checkpoints) // 5)
        for cases in (checkpoints, models, corpora):
            random.Random(0).shuffle(cases)
        yield from interleave([checkpoints, models, corpora, every])

    def newest(self, name: str, word: str, chance: random.Random, place: Path) -> Outcome:
        """Damage the newest checkpoint of an interrupted run."""
        subject = chance.choice(self.subjects)
        run = subject.copy(place)
        checkpoint = max((run / "checkpoints").glob("step-*"))
        harm(checkpoint, name, word, chance)
        before = snapshot(run)
        ended = start(subject.reference.recipe, run, place / "log", around=nullcontext).end()
        label = [f"checkpoint: {word}"]
        if ended.code in (1, 2) and "hash matching" in word and snapshot(run) == before:
            return refusal(ended, label, run)
        if ended.code:
            return Outcome(False, "not resumed", label, ended.output[-1500:])
        if found := differences(run, subject.reference):
            return Outcome(False, "differs", label, "; ".join(found[:5]))
        passed_over = checkpoint.name in ended.output
        return Outcome(True, "fell back, bit-equal" if passed_over else "harmless", label)

    def every_checkpoint(self, chance: random.Random, place: Path) -> Outcome:
        """Damage all checkpoints: the run must fail and change nothing."""
        subject = chance.choice(self.subjects)
        run = subject.copy(place)
        label = ["checkpoint: all of them"]
        for checkpoint in (run / "checkpoints").glob("step-*"):
            name = chance.choice(CHECKPOINT_FILES)
            harm(checkpoint, name, chance.choice(["truncated", "empty", "random bytes"]), chance)
        before = snapshot(run)
        ended = start(subject.reference.recipe, run, place / "log", around=nullcontext).end()
        if ended.code == 0:
            return Outcome(False, "trained anew", label, ended.output[-1500:])
        if snapshot(run) != before:
            return Outcome(False, "the run was changed", label, ended.output[-1500:])
        return refusal(ended, label, run)

    def model(self, name: str, word: str, chance: random.Random, place: Path) -> Outcome:
        """Damage an exported model: it must be refused, or work as before."""
        folder = place / "model"
        shutil.copytree(chance.choice(self.subjects).reference.run / "model", folder)
        command: tuple[str, ...] = ("generate", str(folder), *PROMPT)
        if name == "config.json" and chance.random() < 0.5:
            command = ("inspect", str(folder))
        whole = tokenformer(command, place / "whole.log", limits=bounded(place)).end()
        harm(folder, name, word, chance)
        ended = tokenformer(command, place / "log", limits=bounded(place)).end()
        label = [f"model: {word}"]
        if ended.code in (1, 2):
            return refusal(ended, label, folder)
        if ended.code or ended.has_traceback:
            return Outcome(False, "crashed", label, f"{command[0]} {name}: {ended.output[-1500:]}")
        if answer(ended.output) == answer(whole.output) and name != "model.safetensors":
            return Outcome(True, "harmless", label)
        return Outcome(False, "believed", label, f"{command[0]} {name}: {ended.output[-500:]}")

    def broken_corpus(self, name: str, word: str, chance: random.Random, place: Path) -> Outcome:
        """Damage the corpus of a new run."""
        corpus, label = place / "corpus", [f"corpus: {word}"]
        shutil.copytree(self.corpus, corpus)
        harm(corpus, name, word, chance)
        recipe = chance.choice(self.subjects).reference.recipe
        options = ("--data.corpus", str(corpus), "--max_steps", "2", "--out", str(place / "run"))
        ended = tokenformer(("train", str(recipe), *options), place / "log").end()
        if ended.code == 0:
            return Outcome(False, "believed", label, f"{name}: {ended.output[-500:]}")
        return refusal(ended, label, corpus)


def answer(output: str) -> list[str]:
    """Return the output of a command, without warnings of ignored keys in config.json."""
    return [line for line in output.splitlines() if "has no effect; the option is" not in line]


def kinds_for(name: str) -> list[str]:
    return [*damage.ANY, *(damage.JSON_ONLY if name.endswith(".json") else {})]


def harm(folder: Path, name: str, word: str, chance: random.Random) -> None:
    """Damage a file in a folder, or the folder itself if no file is named."""
    kinds: dict[str, Damage] = damage.ANY | damage.JSON_ONLY | damage.WHOLE
    kinds[word](chance.choice(sorted(folder.glob(name))) if name else folder, chance)


def interleave(lists: list[list[Case]]) -> Iterator[Case]:
    """Interleave the lists evenly."""
    places = [
        ((place + 0.5) / len(cases), number, case)
        for number, cases in enumerate(lists)
        for place, case in enumerate(cases)
    ]
    yield from (case for _, _, case in sorted(places, key=lambda entry: entry[:2]))


def refusal(ended: Ended, label: list[str], named: Path) -> Outcome:
    """Check that an error is one line about the file, not a traceback."""
    if ended.code not in (1, 2) or ended.has_traceback:
        return Outcome(False, "crashed", label, ended.output[-1500:])
    lines = [line for line in ended.output.splitlines() if line.startswith("tokenformer")]
    if not lines:
        return Outcome(False, "refused without a word", label, ended.output[-1500:])
    if str(named) not in ended.output:
        return Outcome(False, "refused without the name", label, lines[-1])
    return Outcome(True, "refused", label)


def bounded(place: Path) -> Limits:
    return Limits(memory=2 << 30, disk=1 << 28, folder=place)


def snapshot(folder: Path) -> dict[str, str]:
    """Return names and hashes of all files below a folder."""
    found = {}
    for base, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(base) / name
            whole = path.is_file()
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest() if whole else ""
    return found
