"""The command `tokenformer`: one table of verbs, each a function whose signature is its options.

A verb's module imports neither torch nor transformers at its top, so that every `--help` answers at
once; the function imports what it needs. Bad input ends with exit code 2 and one line on stderr.
"""

import importlib
import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NoReturn, get_origin, get_type_hints

from jsonargparse import ArgumentParser

from tokenformer import __version__
from tokenformer.cli.errors import InputError

VERBS = {
    "demo": "tokenformer.cli.demo:demo",
    "inspect": "tokenformer.cli.inspect:inspect",
}


class OneLineParser(ArgumentParser):
    """jsonargparse's parser with its errors on one line."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        line = " ".join(str(message).split()).rstrip(".")
        program = self.prog.replace(" [options]", "")
        sys.stderr.write(f"{program}: {line}; see {program} --help\n")
        raise SystemExit(2)


def build_parser() -> OneLineParser:
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
        verb.add_function_arguments(function, as_group=False, as_positional=True)
        verbs.add_subcommand(name, verb, help=summary)
    return parser


def load(target: str) -> Any:
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)


def spell_out(arguments: Sequence[str]) -> list[str]:
    """Bare flags and lists in jsonargparse's own spelling: `--json` becomes `--json=true`, whatever
    stands after it, and `--lengths 1024 2048` becomes `--lengths=[1024,2048]`."""
    hints: dict[str, Any] = {}
    if arguments and arguments[0] in VERBS:
        hints = {f"--{n}": h for n, h in get_type_hints(load(VERBS[arguments[0]])).items()}
    spelled: list[str] = []
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        if hints.get(word) is bool:
            word += "=true"
        elif get_origin(hints.get(word)) in (list, tuple):
            values = list(takewhile(lambda value: not value.startswith("--"), waiting))
            del waiting[: len(values)]
            joined = ",".join(values)
            word += f"={joined}" if joined.startswith("[") else f"=[{joined}]"
        spelled.append(word)
    return spelled


def main(arguments: Sequence[str] | None = None) -> None:
    parser = build_parser()
    chosen = parser.parse_args(spell_out(sys.argv[1:] if arguments is None else arguments))
    verb = chosen["verb"]
    options = parser.instantiate(chosen)[verb].as_dict()
    try:
        load(VERBS[verb])(**options)
    except InputError as error:
        sys.stderr.write(f"tokenformer {verb}: {error}\n")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        sys.stderr.write(f"tokenformer {verb}: interrupted\n")
        raise SystemExit(130) from None
