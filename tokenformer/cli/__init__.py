"""The command `tokenformer`: one table of verbs, each a function whose signature is its options.

A verb's module imports neither torch nor transformers at its top, so that every `--help` answers at
once; the function imports what it needs. Bad input ends with exit code 2 and one line on stderr.
"""

import difflib
import importlib
import re
import sys
from collections.abc import Sequence
from inspect import signature
from itertools import takewhile
from json import dumps
from pathlib import Path
from typing import Any, ClassVar, NoReturn, get_origin, get_type_hints

from jsonargparse import ArgumentParser, set_parsing_settings

from tokenformer import __version__
from tokenformer.cli.errors import InputError

RECIPE = "recipe"
"""The parameter of a verb whose options can come from a YAML file."""

# A function may not have the name of one in `tokenformer` itself: jsonargparse would look that up,
# and so import torch.
VERBS = {
    "convert": "tokenformer.cli.convert:convert_model",
    "demo": "tokenformer.cli.demo:demo",
    "evaluate": "tokenformer.cli.evaluate:evaluate",
    "generate": "tokenformer.cli.generate:generate",
    "grow": "tokenformer.cli.grow:grow_model",
    "inspect": "tokenformer.cli.inspect:inspect",
    "merge": "tokenformer.cli.merge:merge_models",
    "predict": "tokenformer.cli.predict:predict",
    "prepare": "tokenformer.cli.prepare:prepare",
    "prune": "tokenformer.cli.prune:prune_model",
    "serve": "tokenformer.cli.serve:serve",
    "train": "tokenformer.cli.train:train",
}


class OneLineParser(ArgumentParser):
    """jsonargparse's parser with its errors on one line."""

    known: ClassVar[list[str]] = []
    """Every option of every verb, to find the one that was meant."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        line = " ".join(str(message).split()).rstrip(".")
        if wrong := re.match(r'Parser key "([^"]+)": (.*)(?:Got|Given) value: (.*)', line):
            name, reason, value = wrong.groups()
            types = re.findall(r"Expected a <class '(?!NoneType)(\w+)'>", reason)
            line = f"--{name} {value} is not valid; expected {' or '.join(types) or reason}"
        elif unknown := re.search(
            r"not accept option '([^']+)'|unrecognized arguments: --(\S+)", line
        ):
            name = unknown[1] or unknown[2]
            near = difflib.get_close_matches(name, self.known, n=1)
            line = f"{name} is not an option" + (f"; did you mean {near[0]}?" if near else "")
        program = self.prog.replace(" [options]", "")
        sys.stderr.write(f"{program}: {line}; see {program} --help\n")
        raise SystemExit(2)


def build_parser() -> OneLineParser:
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = OneLineParser(
        prog="tokenformer",
        description="Train, grow, adapt and study models whose parameters are tokens.",
        version=__version__,
    )
    verbs = parser.add_subcommands(dest="verb", required=True)
    for name, target in VERBS.items():
        function = load(target)
        summary = (function.__doc__ or "").partition("\n\n")[0]
        verb = OneLineParser(description=summary)
        skip = set()
        if RECIPE in get_type_hints(function):
            verb.add_argument(f"--{RECIPE}", action="config", help="the recipe, a YAML file")
            skip = {RECIPE}
        verb.add_function_arguments(function, as_group=False, as_positional=True, skip=skip)
        OneLineParser.known += [action.dest for action in verb._actions]
        verbs.add_subcommand(name, verb, help=summary)
    return parser


def load(target: str) -> Any:
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)


def is_value(word: str) -> bool:
    """Not an option; a negative number is a value."""
    return re.match(r"-\D", word) is None


def spell_out(arguments: Sequence[str]) -> list[str]:
    """Flags, lists and recipes in jsonargparse's own spelling: `--json` becomes `--json=true`,
    whatever stands after it, `--lengths 1024 2048` becomes `--lengths=[1024,2048]`, `train FILE`
    becomes `train --recipe=FILE` and `predict MODEL A B` becomes `predict MODEL ["A","B"]`."""
    hints: dict[str, Any] = {}
    positional: list[str] = []
    arguments = list(arguments)
    if arguments and arguments[0] in VERBS:
        function = load(VERBS[arguments[0]])
        hints = {f"--{n}": h for n, h in get_type_hints(function).items()}
        parameters = signature(function).parameters.values()
        required = [p.name for p in parameters if p.default is p.empty]
        positional = [f"--{name}" for name in required if name != RECIPE]
        if hints.pop(f"--{RECIPE}", None) and len(arguments) > 1 and is_value(arguments[1]):
            arguments[1] = f"--{RECIPE}={arguments[1]}"
    spelled: list[str] = []
    waiting = arguments
    while waiting:
        word = waiting.pop(0)
        name, given, value = word.partition("=")
        if hints.get(name) is bool and not given:
            word = f"{name}=true"
        elif get_origin(hints.get(name)) in (list, tuple):
            values = [value] if given else list(takewhile(is_value, waiting))
            if not given:
                del waiting[: len(values)]
            joined = ",".join(values)
            word = f"{name}={joined}" if joined.startswith("[") else f"{name}=[{joined}]"
        elif spelled and positional and is_value(word) and spelled[-1] not in hints:
            many = get_origin(hints[positional.pop(0)]) is list
            values = [word, *takewhile(is_value, waiting)] if many else [word]
            del waiting[: len(values) - 1]
            word = dumps(values) if many else word
        spelled.append(word)
    return spelled


def main(arguments: Sequence[str] | None = None) -> None:
    command = "tokenformer"
    try:
        parser = build_parser()
        chosen = parser.parse_args(spell_out(sys.argv[1:] if arguments is None else arguments))
        command = f"tokenformer {chosen['verb']}"
        try:
            options = vars(parser.instantiate(chosen)[chosen["verb"]])
        except ValueError as error:  # from an option dataclass
            raise InputError(str(error)) from None
        if RECIPE in options:
            if not options[RECIPE]:
                raise InputError("the recipe is missing: tokenformer train RECIPE.yaml")
            options[RECIPE] = [Path(str(file)) for file in options[RECIPE]]
        load(VERBS[chosen["verb"]])(**options)
    except InputError as error:
        sys.stderr.write(f"{command}: {error}\n")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        sys.stderr.write(f"{command}: interrupted\n")
        raise SystemExit(130) from None
