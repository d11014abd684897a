"""The folders of the package form layers: each imports only the layers above it."""

import ast
from pathlib import Path

import tokenformer

PACKAGE = Path(tokenformer.__file__).parent
BASE_MODULES = {path.stem for path in PACKAGE.glob("[!_]*.py")}
"""Modules at the top, such as errors.py and files.py, which import none of the layers."""
LAYERS = [
    "ops",
    "layers",
    "models",
    "growth",
    "adapters",
    "data",
    "train",
    "evaluate",
    "interpret",
    "convert",
    "serve",
    "cli",
]


def imported_names(source: str) -> set[str]:
    """Return the folders and modules of the package that a module imports, also in functions."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports must be absolute"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    parts = [name.split(".") for name in names]
    return {p[1] for p in parts if p[0] == "tokenformer" and len(p) > 1}


def test_layers_import_only_the_layers_above():
    found = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert found <= set(LAYERS), "add the new folder to LAYERS, in reading order"
    for index, layer in enumerate(LAYERS):
        for path in (PACKAGE / layer).rglob("*.py"):
            below = imported_names(path.read_text()) & set(LAYERS[index + 1 :])
            assert not below, f"{path.relative_to(PACKAGE)} imports {below}, which are below it"


def test_base_modules_import_no_layer():
    for name in BASE_MODULES:
        imported = imported_names((PACKAGE / f"{name}.py").read_text())
        assert imported <= BASE_MODULES, f"{name}.py imports {imported}"


def test_the_check_sees_imports_in_functions():
    assert imported_names("def f():\n    from tokenformer.cli import main") == {"cli"}
    assert imported_names("import torch\nimport tokenformer.ops.theta") == {"ops"}


def test_no_module_is_a_dumping_ground():
    names = {path.stem for path in PACKAGE.rglob("*.py")}
    assert not names & {"utils", "helpers", "common", "misc"}
