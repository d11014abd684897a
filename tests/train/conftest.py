"""A small corpus, a recipe for it and a small disk, for tests that start real runs."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.corpora import prepare_small_corpus
from tests.support.processes import run
from tests.support.training import SECTIONS


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_small_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def recipe(corpus: Path, tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    sections = {**SECTIONS, "data": {**SECTIONS["data"], "corpus": str(corpus)}}
    path.write_text(json.dumps(sections))  # JSON is YAML
    return path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 4 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    try:
        done = run(mount)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"mounting a small disk is not permitted: {done.stderr.strip()}")
    yield place
    run(["umount", str(place)], check=True)
