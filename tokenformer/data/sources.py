"""What a corpus is made of: files of text or rows, members of archives, splits of a dataset.

`find_sources` turns what a user names into a list in a fixed order. A file named after a split
(`train.jsonl`, `val/00.txt`, `test.parquet`), or a split that a dataset has of its own, stays what
it is; everything else is divided by `documents.Division`.
"""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from tokenformer.data.packaging import Unpacked, archive_members, bare_name, readable, unpacked
from tokenformer.data.reading import RAW, USUAL, Reading, as_utf8, marked_encoding
from tokenformer.errors import DataError
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
    reading: Reading = USUAL

    def stamp(self) -> list[int]:
        """Size and time of the last change of a file; of a dataset's folder, the sums of all."""
        with readable(self.name):
            if self.kind == "dataset":
                found = [path.stat() for path in self.path.rglob("*")] if self.path.name else []
            else:
                found = [self.path.stat()]
        return [sum(f.st_size for f in found), sum(f.st_mtime_ns for f in found)]

    @contextmanager
    def opened(self) -> Iterator[Unpacked]:
        """The text or the lines of a file, unpacked, as UTF-8."""
        with unpacked(self.path, self.member, self.reading.max_ratio) as (stream, file):
            yield Unpacked(as_utf8(stream, self.name, self.reading), file)

    def start(self) -> bytes:
        """The first bytes, unpacked but as they are."""
        with unpacked(self.path, self.member, self.reading.max_ratio) as (stream, _):
            return stream.read(SAMPLE)

    def is_plain(self) -> bool:
        """Whether the text is the file's bytes as they are, so that any part can be read alone."""
        if self.member is not None or bare_name(self.path.name) != self.path.name:
            return False
        if self.reading.encoding == RAW:
            return True
        as_it_is = self.reading.encoding is None and self.reading.errors == "strict"
        return as_it_is and marked_encoding(self.start())[0] is None

    def identity(self) -> dict[str, Any]:
        """By which a later run tells whether this is still the same source, wherever it lies."""
        found: dict[str, Any] = {"name": self.name, "split": self.split}
        if self.kind != "dataset":
            with readable(self.name):
                found |= {"size": self.size, "sample": sampled_hash(self.path)}
        return found


def find_sources(corpus: str, subset: str | None = None, reading: Reading = USUAL) -> list[Source]:
    return [replace(source, reading=reading) for source in named_sources(corpus, subset)]


def named_sources(corpus: str, subset: str | None) -> list[Source]:
    path = expand_user(corpus)
    if corpus.startswith(DATASETS_PREFIX):
        return dataset_sources(corpus.removeprefix(DATASETS_PREFIX), subset)
    if not exists(path):
        if is_local(corpus) or path.suffix or not DATASET_NAME.fullmatch(corpus):
            raise DataError(
                f"{missing_message(corpus)} "
                "(give a file, a folder, or a dataset such as owner/name)"
            )
        return dataset_sources(corpus, subset)
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
    """Whether a source of text has a zero byte near its start, which no text does but UTF-16."""
    if source.kind != "text" or source.reading.has_zero_bytes:
        return False
    start = source.start()
    return b"\0" in start and marked_encoding(start)[0] is None


def sampled_hash(path: Path) -> str:
    """A hash of a file's start, middle and end: enough to tell files apart, cheap at any size. Of
    a file of at most 3 * SAMPLE bytes it covers all."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for offset in (0, max(0, size // 2 - SAMPLE // 2), max(0, size - SAMPLE)):
            file.seek(offset)
            digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def dataset_sources(name: str, subset: str | None) -> list[Source]:
    """The splits of a `datasets` dataset, streamed: nothing is downloaded whole."""
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
