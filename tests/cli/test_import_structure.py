"""The cache of the names that transformers' models export."""

import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tokenformer.cli.import_structure import CACHE, cache_import_structure, folder_stamp
from tokenformer.files import cache_folder


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package like transformers, with one model; `calls` counts how often it is read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "package"
    (root / "models" / "own").mkdir(parents=True)
    (root / "models" / "__init__.py").touch()
    (root / "models" / "own" / "modeling_own.py").write_text("__all__ = ['OwnModel']\n")
    calls: list[Any] = []

    def define_import_structure(path: Any, prefix: str | None = None) -> Any:
        calls.append(path)
        file = root / "models" / "own" / "modeling_own.py"
        module = "own.modeling_own" if prefix is None else f"{prefix}.own.modeling_own"
        return {frozenset({"torch"}): {module: {file.read_text().split("'")[1]}}, frozenset(): {}}

    return SimpleNamespace(
        __file__=str(root / "utils" / "import_utils.py"),
        define_import_structure=define_import_structure,
        models=root / "models",
        calls=calls,
    )


def names(package: Any, *args: Any) -> Any:
    """What the package exports, in a process that starts now."""
    process = SimpleNamespace(**vars(package))
    cache_import_structure(process)
    return process.define_import_structure(*args)


def test_the_structure_is_read_once(package: Any) -> None:
    expected = package.define_import_structure(package.models)
    prefixed = package.define_import_structure(package.models, "models")
    package.calls.clear()
    assert names(package, package.models) == expected
    assert names(package, package.models, "models") == prefixed
    assert names(package, str(package.models / "__init__.py")) == expected
    assert len(package.calls) == 1
    own = package.models / "own"
    names(package, own)
    assert package.calls[1:] == [own]


def test_the_caller_may_add_to_the_structure(package: Any) -> None:
    cache_import_structure(package)
    package.define_import_structure(package.models)[frozenset()]["more"] = {"Name"}
    assert "more" not in package.define_import_structure(package.models)[frozenset()]


def test_a_changed_file_is_read_again(package: Any) -> None:
    names(package, package.models)
    before = folder_stamp(package.models)
    file = package.models / "own" / "modeling_own.py"
    file.write_text("__all__ = ['Another']\n")
    assert folder_stamp(package.models) != before
    assert names(package, package.models)[frozenset({"torch"})] == {"own.modeling_own": {"Another"}}
    (package.models / "new").mkdir()
    (package.models / "new" / "modeling_new.py").touch()
    names(package, package.models)
    assert len(package.calls) == 3


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"stamp": "STAMP", "structure": [1]}'])
def test_a_damaged_cache_is_ignored(content: str, package: Any) -> None:
    expected = names(package, package.models)
    content = content.replace("STAMP", folder_stamp(package.models))
    (cache_folder() / CACHE).write_text(content)
    assert names(package, package.models) == expected
    assert names(package, package.models) == expected
    assert len(package.calls) == 2


def test_without_a_writable_cache_it_works(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    assert names(package, package.models) == package.define_import_structure(package.models)


def test_a_version_without_the_function_is_left_alone(package: Any) -> None:
    del package.define_import_structure
    cache_import_structure(package)
    assert not hasattr(package, "define_import_structure")


def test_the_names_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.utils import import_utils

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec = importlib.util.find_spec("transformers.models")
    assert spec is not None
    original = import_utils.define_import_structure
    original = getattr(original, "__wrapped__", original)
    expected = original(spec.origin, "models")
    for _ in range(2):
        process = SimpleNamespace(__file__=import_utils.__file__, define_import_structure=original)
        cache_import_structure(process)
        assert process.define_import_structure(spec.origin, "models") == expected
    assert (tmp_path / "tokenformer" / CACHE).exists()
