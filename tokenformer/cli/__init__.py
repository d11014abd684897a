"""The command `tokenformer`: one table of verbs, each a function whose signature is its options.

A verb's module imports neither torch nor transformers at its top, so that every `--help` answers at
once; the function imports what it needs. Bad input ends with exit code 2 and one line on stderr.
"""

import importlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from jsonargparse import ArgumentParser

from tokenformer import __version__
from tokenformer.cli.errors import InputError

VERBS = {
    "demo": "tokenformer.cli.demo:demo",
    "inspect": "tokenformer.cli.inspect:inspect",
}


class OneLineParser(ArgumentParser):  # type: ignore[misc]
    """jsonargparse's parser with its errors on one line."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        line = " ".join(str(message).split()).rstrip(".")
        program = self.prog.replace(" [options]", "")
        sys.stderr.write(f"{program}: {line}; see {program} --help\n")
        raise SystemExit(2)


def build_parser() -> tuple[OneLineParser, set[str]]:
    """The parser of all verbs, and the boolean options among theirs."""
    parser = OneLineParser(
        prog="tokenformer",
        description="Train, grow, adapt and study models whose parameters are tokens.",
        version=__version__,
    )
    verbs = parser.add_subcommands(dest="verb", required=True)
    flags: set[str] = set()
    for name, target in VERBS.items():
        function = load(target)
        summary = (function.__doc__ or "").partition("\n\n")[0]
        verb = OneLineParser(description=summary)
        verb.add_function_arguments(function, as_group=False, as_positional=True)
        for action in verb._actions:
            if getattr(action, "_typehint", None) is bool:
                action.nargs, action.metavar = "?", "true|false"
                flags.update(action.option_strings)
        verbs.add_subcommand(name, verb, help=summary)
    return parser, flags


def load(target: str) -> Any:
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)


def main(arguments: Sequence[str] | None = None) -> None:
    parser, flags = build_parser()
    arguments = sys.argv[1:] if arguments is None else arguments
    # A bare --json means --json=true, whatever stands after it.
    chosen = parser.parse_args([f"{a}=true" if a in flags else a for a in arguments])
    verb = chosen["verb"]
    options = parser.instantiate_classes(chosen)[verb].as_dict()
    try:
        load(VERBS[verb])(**options)
    except InputError as error:
        sys.stderr.write(f"tokenformer {verb}: {error}\n")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        sys.stderr.write(f"tokenformer {verb}: interrupted\n")
        raise SystemExit(130) from None
