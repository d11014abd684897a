"""A small corpus and a workspace for the experiments."""

from pathlib import Path

import pytest

from experiments.workspace import Workspace
from tests.support.corpora import prepare_small_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_small_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """With both corpora of the scale `smoke`."""
    found = Workspace(tmp_path_factory.mktemp("experiments"), small=True)
    found.prepare_data({"python", "enwik8"})
    return found
