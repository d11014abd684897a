"""A small corpus for the studies."""

from pathlib import Path

import pytest

from tests.support.corpora import prepare_small_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_small_corpus(tmp_path_factory.mktemp("corpus"))
