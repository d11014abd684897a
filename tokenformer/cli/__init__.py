"""The command `tokenformer`: one table of commands, each a function whose signature is its options.

The module of a command imports neither torch nor transformers at the top, so `--help` and input
errors are fast; the function imports them after it has checked its arguments. Bad input ends with
exit code 2 and one line on stderr.
"""

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenformer.cli.interrupts import INTERRUPTED, exit_in_imports
from tokenformer.errors import TokenformerError

# A function must not have the name of one in `tokenformer` itself: jsonargparse would look that up
# and thereby import torch.
COMMANDS = {
    "adapt": "tokenformer.cli.adapt:adapt_model",
    "convert": "tokenformer.cli.convert:convert_model",
    "demo": "tokenformer.cli.demo:demo",
    "evaluate": "tokenformer.cli.evaluate:evaluate",
    "explore": "tokenformer.cli.explore:explore",
    "generate": "tokenformer.cli.generate:generate",
    "grow": "tokenformer.cli.grow:grow_model",
    "inspect": "tokenformer.cli.inspect:inspect",
    "join": "tokenformer.cli.join:join_models",
    "merge": "tokenformer.cli.merge:merge_models",
    "predict": "tokenformer.cli.predict:predict",
    "prepare": "tokenformer.cli.prepare:prepare",
    "prune": "tokenformer.cli.prune:prune_model",
    "serve": "tokenformer.cli.serve:serve",
    "sparsify": "tokenformer.cli.sparsify:sparsify_model",
    "train": "tokenformer.cli.train:train",
}
USAGE = {
    "adapt": "MODEL --data DATA --out FOLDER",
    "convert": "SOURCE --out FOLDER",
    "demo": "[--out FOLDER]",
    "evaluate": "MODEL --perplexity DATA (or --tasks NAMES, --images or --captions DATA)",
    "explore": "MODEL --data DATA --out SITE",
    "generate": "MODEL --prompt TEXT [--image FILE]",
    "grow": "MODEL --to SIZE --out FOLDER",
    "inspect": "MODEL_OR_PRESET",
    "join": "VISION LANGUAGE --out FOLDER",
    "merge": "A B --out FOLDER",
    "predict": "MODEL IMAGE...",
    "prepare": "CORPUS --out FOLDER",
    "prune": "MODEL --data DATA --keep SHARE --out FOLDER",
    "serve": "MODEL",
    "sparsify": "MODEL --active SHARE --data DATA --out FOLDER",
    "train": "RECIPE [--out FOLDER]",
}
BROKEN_PIPE = 141
"""Exit code of a process ended by SIGPIPE, as shells report it: 128 + 13."""
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Error numbers of a full disk or a failing device."""


class OutputError(TokenformerError):
    """Standard output cannot be written, for example because the disk is full."""

    exit_code = 1


TRAINING = ("adapt", "demo", "train")
"""Commands that use most of what `defer_imports` defers, and run too long to notice."""


def load(target: str) -> Any:
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)


def overview() -> str:
    """Return what `tokenformer --help` prints: one entry per command."""
    from textwrap import wrap

    lines = []
    for name, target in COMMANDS.items():
        summary = (load(target).__doc__ or "").partition("\n\n")[0]
        first, *rest = wrap(" ".join(summary.split()), 64)
        lines += [f"    {name:<12}{first}", *(f"{'':16}{line}" for line in rest)]
    return (
        "usage: tokenformer COMMAND ...\n\n"
        "Train, grow, adapt and study models whose parameters are tokens.\n\n"
        "commands:\n" + "\n".join(lines) + "\n\n"
        "`tokenformer COMMAND --help` lists the options of a command; "
        "`tokenformer --version` prints the version.\n"
    )


def run(words: list[str]) -> None:
    """Run the command that `words` name."""
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(overview())
        return
    if words[0] == "--version":
        from tokenformer import __version__

        sys.stdout.write(f"tokenformer {__version__}\n")
        return
    command = words[0]
    if command not in COMMANDS:
        from difflib import get_close_matches

        near = get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        raise TokenformerError(f"{command} is not a command; {hint}")

    from tokenformer.cli.deferred_imports import defer_imports
    from tokenformer.cli.parser import parse

    function = load(COMMANDS[command])
    if command not in TRAINING:
        defer_imports()
    function(**parse(command, function, words[1:], f"tokenformer {command} {USAGE[command]}"))


def main(arguments: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = " ".join(["tokenformer", *(word for word in words[:1] if word in COMMANDS)])
    open_closed_streams()
    # Threads that wait spin for milliseconds by default, which on a busy machine keeps the cores
    # from those they wait for: small models train ten times slower. Read when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        try:
            with exit_in_imports(command):
                run(words)
        finally:
            flush_output()
    except TokenformerError as error:
        sys.stderr.write(f"{command}: {error}\n")
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        sys.stderr.write(f"{command}: interrupted\n")
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        if not drop_unread_output():
            raise  # another pipe than standard output
        raise SystemExit(BROKEN_PIPE) from None
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        sys.stderr.write(f"{command}: the output cannot be written: {error.strerror}\n")
        raise SystemExit(OutputError.exit_code) from None


def open_closed_streams() -> None:
    """Open /dev/null for streams that the shell closed (`>&-`), which Python sets to None."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115


def flush_output() -> None:
    """Flush standard output; raise `OutputError` if it cannot be written."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # drop the rest
        raise OutputError(f"the output cannot be written: {error.strerror}") from None


def drop_unread_output() -> bool:
    """Return whether a reader has closed our output, as `| head` does. The rest of the output is
    dropped; otherwise Python would report an error at exit."""
    from select import POLLERR, poll

    broken = []
    for stream in (sys.stdout, sys.stderr):
        watch = poll()
        watch.register(stream, 0)
        if any(event & POLLERR for _, event in watch.poll(0)):
            broken.append(stream)
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return bool(broken)
