"""The layout is the architecture: imports point one way only."""

import ast
from pathlib import Path

import tokenformer

PACKAGE = Path(tokenformer.__file__).parent
ROOMS = [
    "ops",
    "layers",
    "models",
    "growth",
    "data",
    "train",
    "evaluate",
    "convert",
    "serve",
    "cli",
]


def imported_rooms(source: str) -> set[str]:
    """Rooms of our own that a module imports, anywhere in it, functions included."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    parts = [name.split(".") for name in names]
    return {p[1] for p in parts if p[0] == "tokenformer" and len(p) > 1 and p[1] in ROOMS}


def test_a_room_imports_only_rooms_above_it():
    found = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert found <= set(ROOMS), "a new room needs its place in the reading order"
    for index, room in enumerate(ROOMS):
        for path in (PACKAGE / room).rglob("*.py"):
            below = imported_rooms(path.read_text()) - set(ROOMS[: index + 1])
            assert not below, f"{path.relative_to(PACKAGE)} imports from {below}, below it"


def test_the_check_itself_sees_imports_in_functions():
    assert imported_rooms("def f():\n    from tokenformer.cli import main") == {"cli"}
    assert imported_rooms("import torch\nimport tokenformer.ops.theta") == {"ops"}


def test_there_is_no_dumping_ground():
    names = {path.stem for path in PACKAGE.rglob("*.py")}
    assert not names & {"utils", "helpers", "common", "misc"}
