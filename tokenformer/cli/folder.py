"""A folder of results that is there whole or not at all."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenformer.cli.errors import InputError


@contextmanager
def new_folder(option: str, path: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `path` when the block ends and vanishes if it fails.

    A path that cannot be used is refused before the work, not after it.
    """
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise InputError(f"{option} {path} is in use; name a new folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise InputError(f"{option} {path} cannot be made: {error.strerror}") from None
    try:
        yield unfinished
        unfinished.chmod(0o755)  # mkdtemp makes it private
        if path.exists():
            path.rmdir()  # empty, as seen above
        unfinished.rename(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
