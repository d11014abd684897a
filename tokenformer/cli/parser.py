"""The parser of a command: the function's signature gives the options, its docstring their help."""

import difflib
import re
import sys
from argparse import SUPPRESS, Action
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from inspect import signature
from itertools import takewhile
from json import dumps
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentParser, DefaultHelpFormatter, set_parsing_settings

from tokenformer.cli.recipes import find_recipe, recipe_list
from tokenformer.errors import InputError
from tokenformer.train.recipe import check_recipe

RECIPE = "recipe"
"""The parameter of a command that takes its options from a YAML file."""
MAX_SUGGESTIONS = 3


class OneLineParser(ArgumentParser):
    """jsonargparse's parser, whose errors are `InputError`s with a message of one line."""

    usage_line = ""
    """How to call the command, shown when an argument is missing."""

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
        near = " or ".join(f"--{option}" for option in self.similar(key)[:MAX_SUGGESTIONS])
        hint = f"did you mean {near}?" if near else f"see {self.prog} --help"
        return InputError(f"--{key} is not an option; {hint}")

    def similar(self, key: str) -> list[str]:
        """Return options similar to an unknown one: the same name in another section (run.steps for
        steps), options that it abbreviates, or a similar spelling."""
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


class HelpFormatter(DefaultHelpFormatter):
    """jsonargparse's formatter, with shorter types: options without a default may be left out, and
    `--json` needs no value."""

    def _expand_help(self, action: Action) -> str:
        text = super()._expand_help(action).removesuffix(" (type: bool, default: False)")
        return re.sub(r"( \| null|Optional\[(.*)\])?, default: null\)$", r"\2)", text)


class ListRecipes(Action):
    """`--list`: print the recipes and exit."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=SUPPRESS, **options)

    def __call__(self, parser: Any, *args: Any) -> None:
        sys.stdout.write(recipe_list())
        parser.exit()


def expected(reason: str) -> str:
    """Return jsonargparse's description of a type: `int`, `fp32 or bf16`."""
    types = re.findall(r"Expected a <class '(?!NoneType)(\w+)'>", reason)
    if choices := re.search(r"Literal\[(.*)\]", reason):
        types = re.findall(r"'([^']*)'", choices[1])
    return " or ".join(types) or reason.strip()


def parse(command: str, function: Callable[..., None], words: Sequence[str], usage: str) -> Any:
    """Return the options for `function` in `words`, validated and converted to its types."""
    arguments = Arguments(function, words)
    if arguments.recipe is not None:
        check_recipe(arguments.recipe)  # unlike jsonargparse, it names the line of a mistake
    parser = build_parser(command, function, usage)
    parsed = parser.parse_args(arguments.words)
    try:
        options = vars(parser.instantiate(parsed))
    except ValueError as error:  # from an option dataclass
        raise InputError(str(error)) from None
    if RECIPE in get_type_hints(function):
        if arguments.recipe is None:
            raise InputError(f"{RECIPE.upper()} is missing: {usage}")
        options[RECIPE] = arguments.recipe
    return options | arguments.texts


def build_parser(command: str, function: Callable[..., None], usage: str) -> OneLineParser:
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    summary = (function.__doc__ or "").partition("\n    Args:")[0]
    parser = OneLineParser(
        prog=f"tokenformer {command}",
        usage=f"{usage} [options]" if usage else None,
        description=" ".join(summary.split()),
        allow_abbrev=False,
        formatter_class=HelpFormatter,
    )
    parser.usage_line = usage
    skip = set()
    if RECIPE in get_type_hints(function):
        parser.add_argument(
            f"--{RECIPE}", action="config", help="Name of a recipe, or a YAML file: RECIPE above."
        )
        parser.add_argument(
            "--list", action=ListRecipes, help="List the recipes with claim and cost, and exit."
        )
        skip = {RECIPE}
    parser.add_function_arguments(function, as_group=False, as_positional=True, skip=skip)
    for action in parser._actions:
        if action.metavar == "{true,false}" and action.default is False:
            action.metavar = ""
        elif not action.option_strings:
            action.metavar = action.dest
    return parser


def is_value(word: str) -> bool:
    """Return whether a word is a value rather than an option; negative numbers are values."""
    return re.match(r"-\D", word) is None


def list_text(hint: Any, values: list[str]) -> str:
    """Return the values of a list option as jsonargparse reads them; texts are quoted, since they
    may hold what YAML gives a meaning."""
    joined = ",".join(values)
    if joined.startswith("["):
        return joined
    return dumps(joined.split(",")) if get_args(hint)[0] in (str, Path) else f"[{joined}]"


def section_flags(hints: dict[str, Any]) -> dict[str, Any]:
    """Return the boolean options in sections, such as `--run.compile`."""
    return {
        f"{section}.{name}": bool
        for section, options in hints.items()
        if is_dataclass(options)
        for name, hint in get_type_hints(options).items()
        if hint is bool
    }


class Arguments:
    """The words of a command line, read once and handed to jsonargparse in its own spelling."""

    words: list[str]
    """`--json` and `--json true` become `--json=true`, `--lengths 1024 2048` and `--lengths 1024
    --lengths 2048` become `--lengths=[1024,2048]`, `train NAME` becomes `train --recipe=FILE`,
    `predict MODEL A B` becomes `predict MODEL ["A","B"]`."""
    texts: dict[str, str]
    """Options of type `str | None`, verbatim: jsonargparse reads `null`, `~` and `# text` as None.
    """
    recipe: Path | None

    def __init__(self, function: Callable[..., None], words: Sequence[str]) -> None:
        self.words, self.texts, self.recipe = [], {}, None
        lists: dict[str, list[str]] = {}
        waiting = list(words)
        hints: dict[str, Any] = {f"--{n}": h for n, h in get_type_hints(function).items()}
        hints |= section_flags(hints)
        parameters = signature(function).parameters.values()
        required = [p.name for p in parameters if p.default is p.empty]
        positional = [f"--{name}" for name in required if name != RECIPE]
        takes_recipe = hints.pop(f"--{RECIPE}", None) is not None
        if takes_recipe and waiting and is_value(waiting[0]):
            self.add_recipe(waiting.pop(0))
        while waiting:
            word = waiting.pop(0)
            name, equals, value = word.partition("=")
            hint = hints.get(name)
            has_value = bool(equals) or (bool(waiting) and is_value(waiting[0]))
            if hint is bool and not equals:
                explicit = bool(waiting) and waiting[0].lower() in ("true", "false")
                self.words.append(f"{name}={waiting.pop(0).lower() if explicit else 'true'}")
            elif get_origin(hint) in (list, tuple):
                values = [value] if equals else list(takewhile(is_value, waiting))
                if not equals:
                    del waiting[: len(values)]
                if name not in lists:
                    self.words.append(f"{name}=")  # completed below
                lists.setdefault(name, []).extend(values)
            elif hint == (str | None) and has_value:
                self.texts[name[2:]] = value if equals else waiting.pop(0)
            elif takes_recipe and name == f"--{RECIPE}" and has_value:
                self.add_recipe(value if equals else waiting.pop(0))
            elif positional and is_value(word) and self.ends_with_value(hints):
                many = get_origin(hints[positional.pop(0)]) is list
                values = [word, *takewhile(is_value, waiting)] if many else [word]
                del waiting[: len(values) - 1]
                self.words.append(dumps(values) if many else word)
            else:
                self.words.append(word)
        for name, values in lists.items():
            self.words[self.words.index(f"{name}=")] = f"{name}={list_text(hints[name], values)}"

    def ends_with_value(self, hints: dict[str, Any]) -> bool:
        """Return whether the next word cannot be the value of the last option."""
        return not self.words or self.words[-1] not in hints

    def add_recipe(self, name: str) -> None:
        self.recipe = find_recipe(name)
        self.words.append(f"--{RECIPE}={self.recipe}")
