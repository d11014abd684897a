"""The parser of one command: the function's signature is its options, its docstring their help."""

import difflib
import re
from collections.abc import Callable, Sequence
from inspect import signature
from itertools import takewhile
from json import dumps
from pathlib import Path
from typing import Any, NoReturn, get_origin, get_type_hints

from jsonargparse import ArgumentParser, set_parsing_settings

from tokenformer.errors import InputError
from tokenformer.train.recipe import check_recipe

RECIPE = "recipe"
"""The parameter of a command whose options can come from a YAML file."""
MOST_SUGGESTED = 3


class OneLineParser(ArgumentParser):
    """jsonargparse's parser with its errors on one line, raised for `main` to print."""

    usage_line = ""
    """How the command is called, shown where an argument is missing."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        line = " ".join(str(message).split()).rstrip(".")
        if absent := re.search(r"arguments are required: (.*)", line):
            names = absent[1].upper().replace(", ", " and ")
            are = "are" if " and " in names else "is"
            raise InputError(f"{names} {are} missing: {self.usage_line}")
        if wrong := re.match(r'Parser key "([^"]+)": (.*)(?:Got|Given) value: (.*)', line):
            key, reason, value = wrong.groups()
            raise InputError(f"--{key} {value} is not valid; expected {expected(reason)}")
        unknown = re.search(r"unrecognized arguments: (?:.*? )??--([^\s=]+)", line)
        unknown = unknown or re.search(r"Option '([^']+)' is not accepted", line)
        if unknown:
            raise self.unknown(unknown[1])
        if unknown := re.search(r"Group '([^']+)' does not accept option '([^']+)'", line):
            raise self.unknown(".".join(unknown.groups()))
        if extra := re.search(r"unrecognized arguments: (.*)", line):
            line = f"unexpected argument {extra[1]}"
        raise InputError(f"{line}; see {self.prog} --help")

    def unknown(self, key: str) -> InputError:
        near = " or ".join(f"--{option}" for option in self.similar(key)[:MOST_SUGGESTED])
        hint = f"did you mean {near}?" if near else f"see {self.prog} --help"
        return InputError(f"--{key} is not an option; {hint}")

    def similar(self, key: str) -> list[str]:
        """Options that may have been meant: of that name in another section, such as run.steps for
        steps; those that it abbreviates; or those spelled alike."""
        known = [a.dest for a in self._actions if a.option_strings and a.dest != "help"]
        last = {option: option.rpartition(".")[2] for option in known}
        alike = difflib.get_close_matches(key, known, n=1)
        last_alike = difflib.get_close_matches(key.rpartition(".")[2], last.values(), n=1)
        return (
            [option for option in known if last[option] == key]
            or [
                option for option in known if option.startswith(key) or last[option].startswith(key)
            ]
            or alike
            or [option for option in known if last[option] in last_alike]
        )


def expected(reason: str) -> str:
    """jsonargparse's description of a type: `int`, `fp32 or bf16`."""
    types = re.findall(r"Expected a <class '(?!NoneType)(\w+)'>", reason)
    if choices := re.search(r"Literal\[(.*)\]", reason):
        types = re.findall(r"'([^']*)'", choices[1])
    return " or ".join(types) or reason.strip()


def parse(verb: str, function: Callable[..., None], words: Sequence[str], usage: str) -> Any:
    """The options that `words` give `function`, checked and in the function's types."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    summary = (function.__doc__ or "").partition("\n\n")[0]
    parser = OneLineParser(prog=f"tokenformer {verb}", description=summary, allow_abbrev=False)
    parser.usage_line = usage
    skip = set()
    if RECIPE in get_type_hints(function):
        parser.add_argument(f"--{RECIPE}", action="config", help="the recipe, a YAML file")
        skip = {RECIPE}
    parser.add_function_arguments(function, as_group=False, as_positional=True, skip=skip)
    spelled = spell_out(function, words)
    for word in spelled:
        if word.startswith(f"--{RECIPE}="):
            check_recipe(Path(word.partition("=")[2]))  # names the line of a mistake
    chosen = parser.parse_args(spelled)
    try:
        options = vars(parser.instantiate(chosen))
    except ValueError as error:  # from an option dataclass
        raise InputError(str(error)) from None
    options |= literal_texts(function, spelled)
    if RECIPE in options:
        if not options[RECIPE]:
            raise InputError(f"{RECIPE.upper()} is missing: {usage}")
        options[RECIPE] = [Path(str(file)) for file in options[RECIPE]]
    return options


def literal_texts(function: Callable[..., None], spelled: Sequence[str]) -> dict[str, str]:
    """The options that are a text or None, as they were given: jsonargparse reads `null`, `~` and
    `# text` as None."""
    pairs = [word[2:].partition("=") for word in spelled if word.startswith("--") and "=" in word]
    hints = get_type_hints(function)
    return {name: value for name, _, value in pairs if hints.get(name) == (str | None)}


def is_value(word: str) -> bool:
    """Not an option; a negative number is a value."""
    return re.match(r"-\D", word) is None


def spell_out(function: Callable[..., None], words: Sequence[str]) -> list[str]:
    """Flags, lists and recipes in jsonargparse's own spelling: `--json` and `--json true` become
    `--json=true`, `--lengths 1024 2048` becomes `--lengths=[1024,2048]`, `train FILE` becomes
    `train --recipe=FILE`, `predict MODEL A B` becomes `predict MODEL ["A","B"]`, and texts are
    joined to their option: `--prompt=null`."""
    waiting = list(words)
    hints: dict[str, Any] = {f"--{n}": h for n, h in get_type_hints(function).items()}
    parameters = signature(function).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty]
    positional = [f"--{name}" for name in required if name != RECIPE]
    if hints.pop(f"--{RECIPE}", None) and waiting and is_value(waiting[0]):
        waiting[0] = f"--{RECIPE}={waiting[0]}"
    spelled: list[str] = []
    while waiting:
        word = waiting.pop(0)
        name, given, value = word.partition("=")
        if hints.get(name) is bool and not given:
            said = bool(waiting) and waiting[0].lower() in ("true", "false")
            word = f"{name}={waiting.pop(0).lower() if said else 'true'}"
        elif get_origin(hints.get(name)) in (list, tuple):
            values = [value] if given else list(takewhile(is_value, waiting))
            if not given:
                del waiting[: len(values)]
            joined = ",".join(values)
            word = f"{name}={joined}" if joined.startswith("[") else f"{name}=[{joined}]"
        elif hints.get(name) == (str | None) and not given and waiting and is_value(waiting[0]):
            word = f"{name}={waiting.pop(0)}"
        elif positional and is_value(word) and (not spelled or spelled[-1] not in hints):
            many = get_origin(hints[positional.pop(0)]) is list
            values = [word, *takewhile(is_value, waiting)] if many else [word]
            del waiting[: len(values) - 1]
            word = dumps(values) if many else word
        spelled.append(word)
    return spelled
