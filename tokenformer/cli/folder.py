"""A folder of results that is there whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path

from tokenformer.cli.errors import InputError


@contextmanager
def new_folder(option: str, path: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `path` when the block ends and vanishes if it fails.

    A path that cannot be used is refused before the work, not after it.
    """
    from tokenformer.train import folder as folders

    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise InputError(f"{option} {path} is in use; name a new folder")
        unfinished = folders.start(path, kin=escape(path.name))
    except OSError as error:
        raise InputError(f"{option} {path} cannot be made: {error.strerror}") from None
    try:
        yield unfinished
        folders.finish(unfinished, path)
    except BaseException:
        folders.discard(unfinished)
        raise
