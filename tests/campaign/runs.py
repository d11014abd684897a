"""The training runs of the campaign: tiny recipes, their uninterrupted reference runs, and the
bitwise comparison of a run with its reference."""

import json
import random
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from tests.campaign.moments import Fault, watched
from tests.campaign.processes import Around, Child, Ended, Limits, tokenformer

MODEL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TOKENS = {"qkv_tokens": 16, "output_tokens": 16, "ffn_tokens": 32}
VISION = {**MODEL, **TOKENS, "image_size": 8, "patch_size": 4}
RUN = {
    "steps": 20,
    "batch_size": 4,
    "checkpoint_every": 4,
    "validate_every": 6,
    "validation_sequences": 4,
    "keep_last": 2,
    "log_to": [],
}
SHARED: dict[str, Any] = {
    "model": {"options": {**MODEL, **TOKENS}},
    "data": {"length": 16},
    "optimizer": {"learning_rate": 0.01},
    "schedule": {"warmup_steps": 3},
    "run": RUN,
}
STAGES = [
    {"steps": 7},
    {"steps": 7, "grow": {"sizes": {"qkv_tokens": 24, "output_tokens": 24, "ffn_tokens": 48}}},
    {"steps": 6, "grow": {"sizes": {"ffn_tokens": 64}, "init": "clone", "scale": "anneal"}},
]
RECIPES: dict[str, dict[str, Any]] = {
    "plain": SHARED,
    "average": {
        **SHARED,
        "data": {"length": 16, "order": "epochs"},
        "run": {**RUN, "ema": 0.9, "micro_batch_size": 1, "nested": [0.5, 1.0]},
    },
    "stages": {**SHARED, "run": {**RUN, "ema": 0.9}, "stages": STAGES},
    "transformer": {
        **SHARED,
        "model": {"family": "transformer", "options": {**MODEL, "intermediate_size": 32}},
        "run": {**RUN, "checkpoint_every": 3},
    },
    "images": {
        **SHARED,
        "model": {"options": {**MODEL, **TOKENS, "new_tokens": 8, "vision_config": VISION}},
        "data": {"length": 16, "on_corrupt": "skip"},
        "optimizer": {"learning_rate": 0.01, "part_rates": {"vision": 0}},
    },
}
UNEQUAL = ("seconds",)
"""Metrics that may differ between equal runs."""
TENSORS = ".safetensors"
UNSEEDED = ("rng.python", "rng.numpy")
"""Generators in a checkpoint that training neither seeds nor uses."""


@dataclass(frozen=True)
class Reference:
    """A recipe with its uninterrupted run."""

    recipe: Path
    run: Path
    counts: dict[str, int]
    """Number of moments by phase; those of loading come from a resumed run."""
    seconds: float
    """Duration of the run."""
    ranks: int = 1


def prepare_corpus(folder: Path) -> Path:
    """Prepare a small corpus of bytes, unless it exists."""
    corpus = folder / "corpus"
    if not (corpus / "index.json").exists():
        text = folder / "text"
        text.mkdir(parents=True, exist_ok=True)
        words = random.Random(0).choices(["token", "key", "value", "grow", "\n"], k=2_000)
        for name in "abcdef":
            (text / f"{name}.txt").write_text(" ".join(words[ord(name) :: 7]))
        arguments = ["prepare", str(text), "--out", str(corpus), "--validation", "0.3"]
        demand(tokenformer(arguments, folder / "prepare.log").end(), "prepare")
    return corpus


def prepare_images(folder: Path) -> Path:
    """Write images with captions, one of them broken, unless they exist."""
    images = folder / "pictures"
    if not images.exists():
        unfinished = folder / "unfinished-pictures"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for split, count in (("train", 12), ("validation", 4)):
            rows = []
            for number in range(count):
                name = f"{split}-{number}.png"
                Image.new("RGB", (8, 8), (20 * number, 90, 200)).save(unfinished / name)
                rows.append({"image": name, "caption": f"number {number}"})
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (unfinished / f"{split}.jsonl").write_text(lines)
        (unfinished / "train-5.png").write_bytes(b"broken")
        unfinished.rename(images)
    return images


def prepare_data(folder: Path, name: str) -> dict[str, str]:
    """Prepare the data of a recipe, and return its options."""
    if name == "images":
        return {"image_text": str(prepare_images(folder))}
    return {"corpus": str(prepare_corpus(folder))}


def prepare_reference(folder: Path, name: str, ranks: int = 1) -> Reference:
    """Train a recipe without faults, unless an earlier campaign did in the same folder."""
    data = prepare_data(folder, name)
    place = folder / (name if ranks == 1 else f"{name}-{ranks}-ranks")
    recipe, run, facts = place / f"{name}.yaml", place / "run", place / "facts.json"
    if not facts.exists():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        sections = {**RECIPES[name], "data": {**RECIPES[name]["data"], **data}}
        recipe.write_text(json.dumps(sections))  # JSON is YAML
        whole = place / "counts.json"
        around = partial(watched, run, None, whole)
        ended = train(recipe, run, place / "log", ranks=ranks, around=around)
        demand(ended, f"the undisturbed run of {name}")
        counts = json.loads(whole.read_text())
        counts["load"] = count_loading(recipe, place)
        facts.write_text(json.dumps({"counts": counts, "seconds": ended.seconds}))
    known = json.loads(facts.read_text())
    return Reference(recipe, run, known["counts"], known["seconds"], ranks)


def count_loading(recipe: Path, place: Path) -> int:
    """Return the number of moments of the phase load in a resumed run."""
    run, counts = place / "resumed", place / "load.json"
    interrupt(recipe, run, place / "interrupted.log")
    demand(
        train(recipe, run, place / "log", around=partial(watched, run, None, counts)), "resuming"
    )
    shutil.rmtree(run)
    return int(json.loads(counts.read_text()).get("load", 0))


def interrupt(recipe: Path, run: Path, log: Path, step: int = 14) -> None:
    """Train until killed in the middle of `step`, assuming three moments per step, one of them in
    the backward pass; if there are more, in an earlier step."""
    ended = train(recipe, run, log, around=partial(watched, run, Fault("step", 3 * step)))
    if not ended.killed:
        raise RuntimeError(f"the run was to be killed in step {step}: {ended.describe()}")


@dataclass(frozen=True)
class Subject:
    """A reference with a run that was killed half way."""

    reference: Reference
    interrupted: Path

    @classmethod
    def of(cls, reference: Reference) -> "Subject":
        run = reference.run.with_name("interrupted")
        if not run.exists():
            unfinished = run.with_name("to-interrupt")
            shutil.rmtree(unfinished, ignore_errors=True)
            interrupt(reference.recipe, unfinished, run.with_name("interrupted.log"))
            unfinished.rename(run)
        return cls(reference, run)

    def copy(self, place: Path) -> Path:
        shutil.copytree(self.interrupted, place / "run")
        return place / "run"


def train(recipe: Path, run: Path, log: Path, *, ranks: int = 1, around: Around) -> Ended:
    """Run `tokenformer train` in a forked process per rank; return how rank 0 ended. `around`
    applies to rank 0."""
    from tests.campaign.ranks import start_ranks

    if ranks == 1:
        return start(recipe, run, log, around=around).end()
    first, *others = start_ranks(recipe, run, log, {0: around}, ranks)
    ended = first.end()
    for other in others:
        other.end()
    return ended


def start(
    recipe: Path, run: Path, log: Path, *, around: Around, environment: dict[str, str] | None = None
) -> Child:
    arguments = ["train", str(recipe), "--out", str(run)]
    limits = Limits(disk=1 << 27, folder=run)
    return tokenformer(arguments, log, around=around, environment=environment, limits=limits)


def demand(ended: Ended, task: str) -> None:
    if ended.code:
        raise RuntimeError(f"{task} failed: {ended.output[-2000:]}")


def differences(run: Path, reference: Reference, *, stopped: bool = False) -> list[str]:
    """Return the differences between a run and its reference, a line each. A run `stopped` by a
    signal saved a checkpoint then, so its older checkpoints may differ."""
    found = compare_metrics(run / "metrics.jsonl", reference.run / "metrics.jsonl")
    here, there = files_of(run), files_of(reference.run)
    if stopped:
        last = f"checkpoints/{max((reference.run / 'checkpoints').iterdir()).name}/"
        here, there = (
            {n for n in names if n.startswith(last) or not n.startswith("checkpoints/step-")}
            for names in (here, there)
        )
    found += [f"{name} is missing" for name in sorted(there - here)]
    found += [f"{name} is left over" for name in sorted(here - there)]
    for name in sorted(here & there):
        one, other = run / name, reference.run / name
        if name.startswith("model/") and name.endswith(".json"):
            found += [] if one.read_bytes() == other.read_bytes() else [f"{name} differs"]
    for folder in sorted({str(Path(name).parent) for name in there if name.endswith(TENSORS)}):
        unequal = unequal_tensors(run / folder, reference.run / folder)
        found += [f"{folder}: {name} differs" for name in unequal]
    return found


def unequal_tensors(one: Path, other: Path) -> list[str]:
    """Return the names of tensors that differ between two folders. torch chooses which rank stores
    a replicated tensor, so the files of a folder are taken together."""
    ours, theirs = tensors_in(one), tensors_in(other)
    return [
        name
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name) and not name.startswith(UNSEEDED)
    ]


def tensors_in(folder: Path) -> dict[str, tuple[Any, ...]]:
    files = [read_tensors(file) for file in folder.glob(f"*{TENSORS}")]
    return {name: tensor for file in files for name, tensor in file.items()}


def read_tensors(file: Path) -> dict[str, tuple[Any, ...]]:
    """Return dtype, shape and bytes of every tensor in a safetensors file."""
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8:begin])
    header.pop("__metadata__", None)
    found = {}
    for name, about in header.items():
        first, last = about["data_offsets"]
        found[name] = (about["dtype"], about["shape"], data[begin + first : begin + last])
    return found


def compare_metrics(path: Path, expected: Path) -> list[str]:
    try:
        rows, others = read_rows(path), read_rows(expected)
    except (OSError, ValueError) as error:
        return [f"metrics.jsonl cannot be read: {error}"]
    if [row.get("step") for row in rows] != [row["step"] for row in others]:
        return [f"metrics.jsonl has the steps {[row.get('step') for row in rows]}"]
    for row, other in zip(rows, others, strict=True):
        for key in sorted(row.keys() | other.keys() - {*UNEQUAL}):
            if key not in UNEQUAL and row.get(key) != other.get(key):
                step, here, there = other["step"], row.get(key), other.get(key)
                return [f"step {step}: {key} is {here!r}, undisturbed {there!r}"]
    return []


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def files_of(run: Path) -> set[str]:
    return {str(file.relative_to(run)) for file in run.rglob("*") if not file.is_dir()}
