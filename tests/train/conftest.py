"""A small corpus and a recipe for it, for tests that start real runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.corpus import prepare_small_corpus

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
    return prepare_small_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def recipe(corpus: Path, tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    sections = {**SECTIONS, "data": {**SECTIONS["data"], "corpus": str(corpus)}}
    path.write_text(json.dumps(sections))  # JSON is YAML
    return path
