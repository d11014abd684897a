"""The checkpoints folder of a run: its newest valid checkpoint, and deleting old ones."""

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
    """Checkpoints by step, oldest first, whole or not."""
    if not Path(folder).is_dir():
        return {}
    found = {path: NAME.fullmatch(path.name) for path in Path(folder).iterdir()}
    return dict(sorted((int(match[1]), path) for path, match in found.items() if match))


def latest(
    folder: Path, *, report: Callable[[str], None] = warnings.warn, hashes: bool = True
) -> Path | None:
    """The newest valid checkpoint, or None where there are no checkpoints. For each newer one that
    is damaged, rank 0 reports why it is skipped. If all are damaged, this raises a CheckpointError:
    a run that began again at step 0 would overwrite what is left of the old one."""
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
    """Delete what a killed `prune` has left. Safe while a checkpoint is being written."""
    ranks = Ranks()
    with ranks.together(f"{folder} cannot be cleaned up"):
        if ranks.first:
            files.delete_leftovers(Path(folder), "step-*", files.DELETED)


def prune(
    folder: Path, *, keep_last: int, best: int | None = None, newest: int | None = None
) -> list[Path]:
    """Delete all but the last `keep_last` checkpoints and that of the step `best`.

    Damaged ones (by their sizes and state) do not count, and are left for their owner to look into;
    so are those of a step after `newest`, if given.
    """
    if keep_last < 1:
        raise CheckpointError(f"keep_last={keep_last} must be at least 1")
    ranks = Ranks()
    removed: list[Path] = []
    with ranks.together(f"checkpoints in {folder} cannot be pruned"):
        if ranks.first:
            whole = {
                step: path
                for step, path in steps(folder).items()
                if (newest is None or step <= newest) and is_whole(path)
            }
            for step in [*whole][:-keep_last]:
                if step != best:
                    files.remove_folder(whole[step])
                    removed.append(whole[step])
    return ranks.share(removed)


def is_whole(path: Path) -> bool:
    try:
        manifest.check_sizes(path)
        parse_document(path)
    except (CheckpointError, OSError):
        return False
    return True
