"""What a corpus is made of: files of text or rows, members of archives, splits of a dataset.

`find_sources` turns what a user names into a list in a fixed order. A file named after a split
(`train.jsonl`, `val/00.txt`, `test.parquet`), or a split that a dataset has of its own, stays what
it is; everything else is divided by `documents.Division`.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from tokenformer.data.errors import DataError
from tokenformer.data.packaging import archive_members, bare_name, unpacked

SPLITS = ("train", "validation", "test")
SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}
KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
DATASETS_PREFIX = "datasets:"
DATASET_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
SAMPLE = 1 << 16


@dataclass(frozen=True)
class Source:
    name: str
    """Relative to the corpus, with `/`; what messages and the index call it."""
    kind: str
    """text (one document), jsonl, parquet or dataset (a document a row)."""
    path: Path = Path()
    member: str | None = None
    """The file of a zip archive."""
    split: str | None = None
    size: int = 0
    """Bytes on disk, for the progress bar."""
    rows: Any = None
    """Of a dataset: its rows, as an iterable that can `skip`."""

    def identity(self) -> dict[str, Any]:
        """By which a later run tells whether this is still the same source, wherever it lies."""
        found: dict[str, Any] = {"name": self.name, "split": self.split}
        if self.kind != "dataset":
            found |= {"size": self.size, "sample": sampled_hash(self.path)}
        return found


def find_sources(corpus: str, subset: str | None = None) -> list[Source]:
    path = Path(corpus)
    if corpus.startswith(DATASETS_PREFIX):
        return dataset_sources(corpus.removeprefix(DATASETS_PREFIX), subset)
    if not exists(path):
        if DATASET_NAME.fullmatch(corpus) and not path.suffix:
            return dataset_sources(corpus, subset)
        raise DataError(
            f"{corpus} does not exist; give a file, a folder or the name of a dataset (owner/name)"
        )
    if subset is not None:
        raise DataError(f"--subset {subset} belongs to a dataset, and {corpus} is a file or folder")
    if path.is_dir():
        sources = [source for file in files_under(path) for source in file_sources(file, path)]
        sources = with_splits(sources)
    else:
        sources = list(file_sources(path, path.parent))
        if len(sources) > 1:
            sources = with_splits(sources)
    if not sources:
        raise DataError(f"{corpus} holds no text, jsonl or parquet file")
    return sources


def exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long, or behind a folder that may not be entered
        return False


def files_under(folder: Path) -> Iterator[Path]:
    """Every file, sorted by its path; hidden ones are left out."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    for path in sorted(found, key=lambda path: path.relative_to(folder).as_posix()):
        if not any(part.startswith(".") for part in path.relative_to(folder).parts):
            yield path


def file_sources(path: Path, root: Path) -> Iterator[Source]:
    name, size = path.relative_to(root).as_posix(), path.stat().st_size
    if path.suffix.lower() == ".zip":
        members = [(m, s) for m, s in archive_members(path) if not hidden(m)]
        total = sum(unpacked_size for _, unpacked_size in members) or 1
        for member, unpacked_size in members:
            share = size * unpacked_size // total
            yield Source(f"{name}/{member}", kind_of(member), path, member, size=share)
    else:
        yield Source(name, kind_of(name), path, size=size)


def hidden(member: str) -> bool:
    parts = PurePosixPath(member).parts
    return any(part != ".." and part.startswith((".", "__MACOSX")) for part in parts)


def kind_of(name: str) -> str:
    bare = bare_name(name)
    if bare.lower().endswith((".tar", ".tgz")):
        raise DataError(
            f"{name} is a tar archive; unpack it and give the folder, or pack it as zip"
        )
    kind = KINDS.get(PurePosixPath(bare).suffix.lower(), "text")
    if kind == "parquet" and bare != name:
        raise DataError(f"{name}: parquet is compressed inside; give it unpacked")
    return kind


def with_splits(sources: list[Source]) -> list[Source]:
    """Sources named after a split, if `train` is among the names; else as they were."""
    named = [replace(source, split=split_in_name(source.name)) for source in sources]
    return named if {"train"} < {source.split for source in named} else sources


def split_in_name(name: str) -> str | None:
    """`train.jsonl.zst`, `train-00000-of-00004.parquet` or `train/any/file.txt` is of train."""
    parts = PurePosixPath(name).parts
    candidates = [*parts[:-1], re.split(r"[-_.]", parts[-1])[0]]
    found = [SPLIT_NAMES[part.lower()] for part in candidates if part.lower() in SPLIT_NAMES]
    return found[0] if found else None


def is_binary(source: Source) -> bool:
    """Whether a source of text holds a zero byte near its start, which no text does."""
    if source.kind != "text":
        return False
    with unpacked(source.path, source.member) as (stream, _):
        return b"\0" in stream.read(SAMPLE)


def sampled_hash(path: Path) -> str:
    """A hash of a file's start, middle and end: enough to tell files apart, cheap at any size."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for offset in (0, max(0, size // 2 - SAMPLE // 2), max(0, size - SAMPLE)):
            file.seek(offset)
            digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def dataset_sources(name: str, subset: str | None) -> list[Source]:
    """The splits of a `datasets` dataset, streamed: nothing is downloaded whole."""
    datasets = load_splits(name, subset)
    sources = []
    for split, rows in datasets.items():
        known = SPLIT_NAMES.get(split.lower())
        if known is None and len(datasets) > 1:
            continue
        label = f"{name}/{subset}/{split}" if subset else f"{name}/{split}"
        sources.append(Source(label, "dataset", split=known, rows=rows))
    if not sources:
        raise DataError(f"{name} has the splits {', '.join(datasets)}; none is one to train on")
    return sorted(sources, key=lambda source: SPLITS.index(source.split or "train"))


def load_splits(name: str, subset: str | None) -> dict[str, Any]:
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    datasets.disable_progress_bars()
    folder = Path(name)
    try:
        if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
            found = datasets.load_from_disk(name)
        else:
            found = datasets.load_dataset(name, subset, streaming=True)
    except (DatasetNotFoundError, FileNotFoundError) as error:
        raise DataError(f"dataset {name} was not found: {one_line(error)}") from None
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"dataset {name} cannot be opened: {one_line(error)}") from None
    splits = dict(found) if isinstance(found, dict) else {"train": found}
    return {
        split: rows.to_iterable_dataset() if isinstance(rows, datasets.Dataset) else rows
        for split, rows in splits.items()
    }


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
