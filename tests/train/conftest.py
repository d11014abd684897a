"""A small corpus and a recipe for it, for tests that start real runs."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tokenformer.cli import main

MODEL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "rotary_fraction": 0.5,
}
SECTIONS: dict[str, Any] = {
    "model": {"options": MODEL},
    "data": {"length": 32},
    "optimizer": {"learning_rate": 0.01},
    "schedule": {"warmup_steps": 3},
    "run": {
        "steps": 24,
        "batch_size": 4,
        "micro_batch_size": 1,  # two ranks of a batch of four then accumulate twice
        "checkpoint_every": 5,
        "validate_every": 8,
        "validation_sequences": 6,
    },
}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    words = random.Random(0).choices(["token", "key", "value", "grow", "\n"], k=20_000)
    for name in "abcdefgh":
        (folder / f"{name}.txt").write_text(" ".join(words[ord(name) :: 9]))
    out = tmp_path_factory.mktemp("prepared") / "corpus"
    main(["prepare", str(folder), "--out", str(out), "--validation", "0.3"])
    return out


@pytest.fixture
def recipe(corpus: Path, tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    sections = {**SECTIONS, "data": {**SECTIONS["data"], "corpus": str(corpus)}}
    path.write_text(json.dumps(sections))  # JSON is YAML
    return path
