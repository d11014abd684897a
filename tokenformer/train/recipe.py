"""Recipe files: YAML of bounded size, with errors that name the file and line.

    check_recipe(Path("recipes/laptop/text.yaml"))     # raises RecipeError

The command-line parser reads recipes too, but does not report lines and does not stop at a file
that expands to gigabytes. Does not import torch, so that mistakes are reported at once.
"""

import difflib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from tokenformer.errors import TokenformerError
from tokenformer.paths import exists, missing_message
from tokenformer.train.options import Recipe

CONFIG = "config.yaml"
"""The recipe of a run, in its folder."""
COMMAND_OPTIONS = ("out", "max_steps", "override", "dry_run")
"""Options of `tokenformer train` besides the sections of a recipe."""
MAX_BYTES = 1 << 18
MAX_VALUES = 20_000
WORDS = {int: "a whole number", float: "a number", bool: "true or false"}
BOOLEANS = ("true", "false", "yes", "no", "on", "off")


class RecipeError(TokenformerError, ValueError):
    """A recipe, or the record of a run, is unreadable or invalid."""


def check_recipe(path: Path) -> None:
    """Raise for invalid YAML, an unknown option or a value of the wrong type."""
    node = Document(path).node
    if not isinstance(node, yaml.MappingNode):
        raise RecipeError(f"{path} is not a recipe: it must hold sections such as model, data, run")
    check_section(path, node, Recipe, "", extra=COMMAND_OPTIONS)


def read_mapping(path: Path, remedy: str = "") -> dict[str, Any]:
    """Return the mapping in a YAML file. `remedy` is appended to error messages."""
    try:
        value = Document(path).value()
    except RecipeError as error:
        raise RecipeError(f"{error}{remedy}") from None
    if not isinstance(value, dict):
        raise RecipeError(f"{path} is damaged: it holds no sections{remedy}")
    return value


class Document:
    """A YAML file as a tree of nodes with line numbers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.loader = yaml.SafeLoader(read_text(path))
        try:
            self.node = self.loader.get_single_node()
            size = expanded_size(self.node)
        except yaml.YAMLError as error:
            raise RecipeError(invalid(path, error)) from None
        except RecursionError:
            raise RecipeError(f"{path} is nested too deeply") from None
        if size > MAX_VALUES:
            raise RecipeError(
                f"{path} expands to more than {MAX_VALUES:,} values by its aliases (*name); "
                "write out the ones it needs"
            )

    def value(self) -> Any:
        if self.node is None:
            return None
        try:
            return self.loader.construct_document(self.node)
        except yaml.YAMLError as error:
            raise RecipeError(invalid(self.path, error)) from None


def read_text(path: Path) -> str:
    if not exists(path):
        raise RecipeError(missing_message(path))
    if not path.is_file():
        raise RecipeError(f"{path} is a folder; name a YAML file")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RecipeError(
                f"{path} is larger than {MAX_BYTES // 1024} kB, too large for a recipe"
            )
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RecipeError(f"{path} is not UTF-8 text") from None


def invalid(path: Path, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    line = "" if mark is None else f", line {mark.line + 1}"
    problem = getattr(error, "problem", None) or str(error)
    return f"{path}{line}: not valid YAML: {' '.join(problem.split())}"


def expanded_size(root: yaml.Node | None) -> int:
    """Count the values of a document with every alias expanded, without expanding them."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = MAX_VALUES + 1  # for a node that contains itself
            sizes[id(node)] = 1 + sum(size(child) for child in children(node))
        return sizes[id(node)]

    return 0 if root is None else size(root)


def children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            yield from pair
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def check_section(
    path: Path, node: yaml.MappingNode, options: type, where: str, extra: tuple[str, ...] = ()
) -> None:
    hints = get_type_hints(options)
    names = [field.name for field in fields(options)]
    seen: set[str] = set()
    for key, value in node.value:
        name, place = str(key.value), f"{path}, line {key.start_mark.line + 1}"
        if name == "<<":  # another mapping, merged into this one
            continue
        if name in seen:
            raise RecipeError(f"{place}: {where}{name} is given twice")
        seen.add(name)
        if name in names:
            check_value(path, value, hints[name], where + name)
        elif name.partition(".")[0] not in (*names, *extra):
            raise RecipeError(
                f"{place}: {where}{name} is not an option{suggestion(name, where, names)}"
            )


def check_value(path: Path, node: yaml.Node, hint: Any, name: str) -> None:
    """Raise for a value that cannot have its option's type; in doubt leave it to the parser."""
    choices = [hint] if get_origin(hint) not in (Union, UnionType) else list(get_args(hint))
    if not isinstance(node, yaml.ScalarNode):
        for choice in choices:
            if is_dataclass(choice) and isinstance(node, yaml.MappingNode):
                check_section(path, node, choice, f"{name}.")  # type: ignore[arg-type]
            if get_origin(choice) is list and isinstance(node, yaml.SequenceNode):
                for index, entry in enumerate(node.value):
                    check_value(path, entry, get_args(choice)[0], f"{name}[{index}]")
        return
    problems = [expected(node, choice) for choice in choices]
    if all(problems):
        place = f"{path}, line {node.start_mark.line + 1}"
        wanted = " or ".join(problem for problem in problems if problem)
        raise RecipeError(f"{place}: {name} is {node.value!r}; expected {wanted}")


def expected(node: yaml.ScalarNode, hint: Any) -> str:
    """Return what is expected instead of this value; an empty string if it may be valid."""
    text = str(node.value)
    if get_origin(hint) is Literal:
        choices = [str(choice) for choice in get_args(hint)]
        return "" if text in choices else f"one of {', '.join(choices)}"
    if hint is bool:
        return "" if text.lower() in BOOLEANS else WORDS[bool]
    if hint in (int, float):
        try:
            hint(text.replace("_", ""))
        except ValueError:
            return WORDS[hint]
    if hint is NoneType:
        return "" if text.lower() in ("", "~", "null", "none") else "null"
    return ""


def suggestion(name: str, where: str, names: list[str]) -> str:
    """Return `; did you mean run.steps?` for a similar name in this section, or one in another."""
    if near := difflib.get_close_matches(name, names, n=1):
        return f"; did you mean {where}{near[0]}?"
    sections = {
        f.name: t for f in fields(Recipe) if is_dataclass(t := get_type_hints(Recipe)[f.name])
    }
    found = [
        f"{section}.{field.name}"
        for section, options in sections.items()
        for field in fields(options)
        if field.name == name
    ]
    if found:
        return f"; did you mean {' or '.join(found)}?"
    return f"; there are {', '.join(names)}" if len(names) < 12 else ""
