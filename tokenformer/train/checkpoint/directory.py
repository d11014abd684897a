"""The checkpoints folder of a run: find the newest valid checkpoint, delete old ones."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path

from tokenformer import files
from tokenformer.errors import CheckpointError
from tokenformer.train.checkpoint import manifest
from tokenformer.train.checkpoint.state import parse_document, read_document
from tokenformer.train.parallel.ranks import Ranks

NAME = re.compile(r"step-(\d{8,})")


def steps(folder: Path) -> dict[int, Path]:
    """Return all checkpoints by step, oldest first, complete or not."""
    if not Path(folder).is_dir():
        return {}
    found = {path: NAME.fullmatch(path.name) for path in Path(folder).iterdir()}
    return dict(sorted((int(match[1]), path) for path, match in found.items() if match))


def latest(
    folder: Path, *, report: Callable[[str], None] = warnings.warn, hashes: bool = True
) -> Path | None:
    """Return the newest valid checkpoint, or None if there are no checkpoints. Rank 0 reports why
    newer ones are skipped. Raises a CheckpointError if all are damaged: a run that restarts at step
    0 would overwrite them."""
    ranks = Ranks()
    damaged: list[str] = []
    for path in ranks.share([*reversed(steps(folder).values())]):
        try:
            manifest.verify(path, hashes=hashes)
            read_document(path)
        except CheckpointError as error:
            damaged.append(str(error))
            if ranks.first:
                report(f"{error}; skipping it")
        else:
            return path
    if damaged:
        raise CheckpointError(
            f"no valid checkpoint in {folder}, {len(damaged)} damaged (the newest: {damaged[0]}); "
            "restore one from a backup; to start over, remove the run folder or choose another "
            "--out"
        )
    return None


def sweep(folder: Path) -> None:
    """Delete the leftovers of a killed `prune`. Safe while a checkpoint is being written."""
    ranks = Ranks()
    with ranks.together(f"{folder} cannot be cleaned up"):
        if ranks.first:
            files.delete_leftovers(Path(folder), "step-*", files.DELETED)


def prune(
    folder: Path, *, keep_last: int, best: int | None = None, newest: int | None = None
) -> list[Path]:
    """Delete all but the last `keep_last` checkpoints and that of the step `best`.

    Checkpoints that are damaged, by their sizes and state, or later than step `newest` do not count
    and are kept for inspection.
    """
    if keep_last < 1:
        raise CheckpointError(f"keep_last={keep_last} must be at least 1")
    ranks = Ranks()
    removed: list[Path] = []
    with ranks.together(f"checkpoints in {folder} cannot be pruned"):
        if ranks.first:
            complete = {
                step: path
                for step, path in steps(folder).items()
                if (newest is None or step <= newest) and is_complete(path)
            }
            for step in [*complete][:-keep_last]:
                if step != best:
                    files.remove_folder(complete[step])
                    removed.append(complete[step])
    return ranks.share(removed)


def is_complete(path: Path) -> bool:
    try:
        manifest.check_sizes(path)
        parse_document(path)
    except (CheckpointError, OSError):
        return False
    return True
