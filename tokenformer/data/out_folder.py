"""The folder that a preparation fills: apart from the corpus, one process at a time, and errors of
writing to it in one line."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tokenformer.errors import DataError
from tokenformer.files import lock_folder
from tokenformer.paths import exists, expand_user


def check_apart(corpus: str, out: Path) -> None:
    folder = expand_user(corpus)
    if exists(folder) and folder.is_dir() and out.resolve().is_relative_to(folder.resolve()):
        raise DataError(f"--out {out} lies in the corpus {corpus}; name a folder outside it")


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """The folder, made if need be, and kept from other processes for as long as this one runs."""
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_folder(out))
        except BlockingIOError:
            raise DataError(f"--out {out} is being filled by another process") from None
        except OSError as error:
            raise DataError(f"--out {out} cannot be made: {error.strerror}") from None
        yield


@contextmanager
def writable(out: Path) -> Iterator[None]:
    """Errors of writing to a folder, a full disk for example; those of reading name their file."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"--out {out} cannot be written: {error.strerror or error}; run the same command again "
            "to continue once it can be"
        ) from None
