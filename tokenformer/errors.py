"""The errors of this package. The command line catches their base class once, in `cli.main`."""


class TokenformerError(Exception):
    """An error the user can act on. Its message is one line: what is wrong, the value given, what
    to do. The command line prints it without a traceback."""

    exit_code = 2
    """2 for bad input, 1 for work that failed."""


class InputError(TokenformerError):
    """A bad option or path on the command line."""


class DataError(TokenformerError, ValueError):
    """A corpus, tokenizer or image folder that cannot be used."""


class ConversionError(TokenformerError):
    """A model that cannot be converted."""


class CheckpointError(TokenformerError):
    """A checkpoint that cannot be written, read or trusted."""

    exit_code = 1


class TrainingError(TokenformerError):
    """Training cannot continue."""

    exit_code = 1


class AdapterError(TokenformerError, ValueError):
    """An adapter that cannot be used, for example because it was trained on another base."""


class DivergedError(TrainingError):
    """Training has diverged: too many bad steps in a row."""


def one_line(error: Exception) -> str:
    """Return the message of an error on one line, or its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def first_line(error: Exception) -> str:
    """Return the first line of another library's error, with its type if it is unexpected."""
    line = next(iter(str(error).strip().splitlines()), "")
    expected = isinstance(error, OSError | ValueError | ImportError | RuntimeError)
    return line if line and expected else f"{type(error).__name__}: {line}".removesuffix(": ")
