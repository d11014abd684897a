"""The sources of a corpus: files of text or rows, members of archives, splits of a dataset.

`find_sources` lists the sources of a path or dataset name in a fixed order. Files named after a
split (`train.jsonl`, `val/00.txt`, `test.parquet`) and the splits of a dataset keep their split;
`splits` assigns all other documents.
"""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from tokenformer.data.compression import (
    OpenFile,
    archive_members,
    open_decompressed,
    read_errors,
    strip_suffixes,
)
from tokenformer.data.text_encoding import (
    DEFAULT_READ_OPTIONS,
    RAW,
    ReadOptions,
    as_utf8,
    detect_byte_order_mark,
)
from tokenformer.errors import DataError, one_line
from tokenformer.paths import check_hub, exists, expand_user, is_local, missing_message

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
"""Bytes of each part of a file that identify it, and that tell text from binary."""


@dataclass(frozen=True)
class Source:
    name: str
    """Path relative to the corpus, with `/`; used in messages and in the index."""
    kind: str
    """text (one document), jsonl, parquet or dataset (one document per row)."""
    path: Path = Path()
    member: str | None = None
    """The member, if `path` is a zip archive."""
    split: str | None = None
    size: int = 0
    """Bytes on disk, for the progress bar."""
    rows: Any = None
    """The `IterableDataset` of a dataset."""
    read_options: ReadOptions = DEFAULT_READ_OPTIONS

    def stamp(self) -> list[int]:
        """Return size and modification time of the file, or their sums over a dataset's folder."""
        with read_errors(self.name):
            if self.kind == "dataset":
                found = [path.stat() for path in self.path.rglob("*")] if self.path.name else []
            else:
                found = [self.path.stat()]
        return [sum(f.st_size for f in found), sum(f.st_mtime_ns for f in found)]

    @contextmanager
    def open(self) -> Iterator[OpenFile]:
        """Open the file, decompressed and as UTF-8."""
        with open_decompressed(self.path, self.member, self.read_options.max_ratio) as (
            stream,
            file,
        ):
            yield OpenFile(as_utf8(stream, self.name, self.read_options), file)

    def start(self) -> bytes:
        """Return the first bytes, decompressed but in the file's encoding."""
        with open_decompressed(self.path, self.member, self.read_options.max_ratio) as (stream, _):
            return stream.read(SAMPLE)

    def is_plain(self) -> bool:
        """Whether the text is exactly the bytes of the file, so that reading can start anywhere."""
        if self.member is not None or strip_suffixes(self.path.name) != self.path.name:
            return False
        options = self.read_options
        if options.encoding == RAW:
            return True
        default = options.encoding is None and options.errors == "strict"
        return default and detect_byte_order_mark(self.start())[0] is None

    def identity(self) -> dict[str, Any]:
        """Return what identifies the source in a later run, wherever it is stored."""
        found: dict[str, Any] = {"name": self.name, "split": self.split}
        if self.kind != "dataset":
            with read_errors(self.name):
                found |= {"size": self.size, "sample": sampled_hash(self.path)}
        return found


def find_sources(
    corpus: str, subset: str | None = None, read_options: ReadOptions = DEFAULT_READ_OPTIONS
) -> list[Source]:
    """List the sources of a file, a folder or a dataset."""
    return [replace(source, read_options=read_options) for source in named_sources(corpus, subset)]


def named_sources(corpus: str, subset: str | None) -> list[Source]:
    path = expand_user(corpus)
    if corpus.startswith(DATASETS_PREFIX):
        return dataset_sources(corpus.removeprefix(DATASETS_PREFIX), subset)
    if not exists(path):
        if is_local(corpus) or path.suffix or not DATASET_NAME.fullmatch(corpus):
            raise DataError(
                f"{missing_message(corpus)} "
                "(pass a file, a folder, or a dataset such as owner/name)"
            )
        return dataset_sources(corpus, subset)
    if subset is not None:
        raise DataError(f"--subset {subset} is for datasets; {corpus} is a file or folder")
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


def files_under(folder: Path) -> Iterator[Path]:
    """Yield every file that is not hidden, sorted by path."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    for path in sorted(found, key=lambda path: path.relative_to(folder).as_posix()):
        if not any(part.startswith(".") for part in path.relative_to(folder).parts):
            yield path


def file_sources(path: Path, root: Path) -> Iterator[Source]:
    name, size = path.relative_to(root).as_posix(), path.stat().st_size
    if path.suffix.lower() == ".zip":
        members = [(m, s) for m, s in archive_members(path) if not is_hidden(m)]
        total = sum(unpacked_size for _, unpacked_size in members) or 1
        for member, unpacked_size in members:
            share = size * unpacked_size // total
            yield Source(f"{name}/{member}", kind_of(member), path, member, size=share)
    else:
        yield Source(name, kind_of(name), path, size=size)


def is_hidden(member: str) -> bool:
    parts = PurePosixPath(member).parts
    return any(part != ".." and part.startswith((".", "__MACOSX")) for part in parts)


def kind_of(name: str) -> str:
    bare = strip_suffixes(name)
    if bare.lower().endswith((".tar", ".tgz")):
        raise DataError(
            f"{name} is a tar archive; unpack it and pass the folder, or convert it to zip"
        )
    kind = KINDS.get(PurePosixPath(bare).suffix.lower(), "text")
    if kind == "parquet" and bare != name:
        raise DataError(f"{name}: parquet is compressed inside; decompress the file")
    return kind


def with_splits(sources: list[Source]) -> list[Source]:
    """Assign sources to splits by name, if `train` is among the names and not the only one."""
    named = [replace(source, split=split_in_name(source.name)) for source in sources]
    return named if {"train"} < {source.split for source in named} else sources


def split_in_name(name: str) -> str | None:
    """Return the split in a file name, such as train in `train.jsonl.zst`,
    `train-00000-of-00004.parquet` and `train/any/file.txt`."""
    parts = PurePosixPath(name).parts
    candidates = [*parts[:-1], re.split(r"[-_.]", parts[-1])[0]]
    found = [SPLIT_NAMES[part.lower()] for part in candidates if part.lower() in SPLIT_NAMES]
    return found[0] if found else None


def is_binary(source: Source) -> bool:
    """Whether a text source has a zero byte near its start, which only UTF-16 and UTF-32 text
    has."""
    if source.kind != "text" or source.read_options.allows_zero_bytes:
        return False
    start = source.start()
    return b"\0" in start and detect_byte_order_mark(start)[0] is None


def sampled_hash(path: Path) -> str:
    """Hash the start, middle and end of a file: enough to tell files apart, cheap at any size. It
    covers all of a file of at most 3 * SAMPLE bytes."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for offset in (0, max(0, size // 2 - SAMPLE // 2), max(0, size - SAMPLE)):
            file.seek(offset)
            digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def dataset_sources(name: str, subset: str | None) -> list[Source]:
    """Return the splits of a `datasets` dataset, which is streamed, not downloaded."""
    local = expand_user(name) if is_local(name) else Path()
    if not is_local(name):
        check_hub(name, "dataset")
    elif not exists(local):
        raise DataError(f"dataset {name} was not found: {missing_message(name)}")
    datasets = load_splits(str(local) if is_local(name) else name, subset)
    sources = []
    for split, rows in datasets.items():
        known = SPLIT_NAMES.get(split.lower())
        if known is None and len(datasets) > 1:
            continue
        label = f"{name}/{subset}/{split}" if subset else f"{name}/{split}"
        sources.append(Source(label, "dataset", local, split=known, rows=rows))
    if not sources:
        raise DataError(f"{name} has no training split; its splits are {', '.join(datasets)}")
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
