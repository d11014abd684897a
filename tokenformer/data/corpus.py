"""A prepared corpus: memory-mapped shards of token ids; each split is one long sequence.

    corpus = Corpus("data/enwik8")
    train = corpus.split("train")
    len(train), train.bytes, train[1_000:1_256]      # ids across shards, as one array

`tokenformer prepare` writes `index.json` last; a folder without it is not a corpus. Opening a split
checks the sizes of its shards, `verify` checks their contents.
"""

import json
import re
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from tokenformer.data.tokenizer import tokenizer_from_file
from tokenformer.errors import DataError
from tokenformer.files import sha256

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TokenIds = npt.NDArray[np.unsignedinteger[Any]]

INDEX = "index.json"
UNFINISHED = "unfinished.json"
TOKENIZER = "tokenizer"
FORMAT = "tokenformer-tokens-1"
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
SHA256 = re.compile("[0-9a-f]{64}")


class TokenSequence(Protocol):
    """A sequence of token ids: an array or a `Split`."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: slice, /) -> TokenIds: ...


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest dtype that holds every id."""
    return DTYPES["uint16" if vocab_size <= 2**16 else "uint32"]


class Split:
    """One split of a corpus, as a `TokenSequence` with its size in bytes and documents."""

    def __init__(self, folder: Path, name: str, dtype: str, entry: dict[str, Any]) -> None:
        self.folder, self.name = folder, name
        self.bytes: int = entry["bytes"]
        """Bytes of text, the denominator of bits per byte."""
        self.documents: int = entry["documents"]
        self.dtype = DTYPES[dtype]
        shards = [(folder / shard["file"], shard["tokens"]) for shard in entry["shards"]]
        self.shards: list[TokenIds] = [
            open_shard(path, tokens, self.dtype) for path, tokens in shards
        ]
        self.ends = list(accumulate(len(shard) for shard in self.shards))

    def __str__(self) -> str:
        return f"split {self.name} of {self.folder}"

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, place: slice) -> TokenIds:
        """Return the ids of a slice: a view of the file if one shard contains them all."""
        start, stop, step = place.indices(len(self))
        if step != 1:
            raise ValueError(f"slices of a split must have steps of 1, not {step}")
        parts: list[TokenIds] = []
        shard = bisect_right(self.ends, start)
        while start < stop:
            offset = self.ends[shard] - len(self.shards[shard])
            parts.append(self.shards[shard][start - offset : stop - offset])
            start, shard = self.ends[shard], shard + 1
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=self.dtype)


class Corpus:
    """A folder that `tokenformer prepare` has finished."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.index = read_index(self.folder)
        self.vocab_size: int = self.index["vocab_size"]
        self.tokenizer = self.folder / TOKENIZER
        """A folder that AutoTokenizer loads."""

    @property
    def splits(self) -> list[str]:
        return list(self.index["splits"])

    def split(self, name: str) -> Split:
        if name not in self.splits:
            raise DataError(f"{self.folder} has no split {name!r}; it has {', '.join(self.splits)}")
        return Split(self.folder, name, self.index["dtype"], self.index["splits"][name])

    def verify(self) -> None:
        """Read every shard and compare its SHA-256 with the index."""
        for entry in self.index["splits"].values():
            for shard in entry["shards"]:
                path = self.folder / shard["file"]
                open_shard(path, shard["tokens"], DTYPES[self.index["dtype"]])
                check_contents(path, shard["sha256"])
            for part in entry.get("examples", {}).values():
                if isinstance(part, dict):
                    check_contents(self.folder / Path(part["file"]).name, part["sha256"])


def check_contents(path: Path, expected: str) -> None:
    if sha256(path) != expected:
        raise DataError(f"{path} has been altered: its SHA-256 differs from the index")


def open_corpus(path: Path, tokenizer: "PreTrainedTokenizerBase | None", vocab_size: int) -> Corpus:
    """Open a prepared corpus and check that its token ids are those of a model. Without a
    tokenizer, only the vocabulary sizes are compared."""
    corpus = Corpus(path)
    if corpus.vocab_size > vocab_size:
        raise DataError(
            f"{path} has a vocabulary of {corpus.vocab_size}, the model one of {vocab_size}; "
            "prepare the text with the model's tokenizer"
        )
    if tokenizer is not None:
        vocabulary = tokenizer_from_file(corpus.tokenizer / "tokenizer.json").get_vocab()
        if not vocabulary.items() <= tokenizer.get_vocab().items():
            raise DataError(
                f"{path} has other token ids than the model's tokenizer; prepare the text with "
                "the model's tokenizer"
            )
    return corpus


def read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if (folder / UNFINISHED).exists():
            raise DataError(
                f"{folder} is not finished; run the same `tokenformer prepare` again to resume"
            ) from None
        raise DataError(
            f"{folder} holds no prepared corpus (no {INDEX}); make one with `tokenformer prepare`"
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}); prepare the corpus again") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise DataError(f"{path} is not of the format {FORMAT}; prepare the corpus again")
    try:
        check_index(index)
    except ValueError as error:
        raise DataError(f"{path} is not valid: {error}; prepare the corpus again") from None
    return index


def check_index(index: dict[str, Any]) -> None:
    """Raise ValueError unless every required field exists and has the right type."""
    if index.get("dtype") not in list(DTYPES):
        raise ValueError(f"dtype is {shown(index.get('dtype'))}, expected {' or '.join(DTYPES)}")
    check_integer(index.get("vocab_size"), 1, "vocab_size")
    if not isinstance(index.get("settings", {}), dict):
        raise ValueError(f"settings are {shown(index['settings'])}")
    splits = index.get("splits")
    if not isinstance(splits, dict) or not splits:
        raise ValueError(f"splits are {shown(splits)}, expected at least one")
    for split, entry in splits.items():
        name = f"splits.{split}"
        if not isinstance(entry, dict):
            raise ValueError(f"{name} is {shown(entry)}")
        for field in ("bytes", "documents"):
            check_integer(entry.get(field), 0, f"{name}.{field}")
        check_shards(entry.get("shards"), name)
        tokens = sum(shard["tokens"] for shard in entry["shards"])
        if entry.get("tokens", tokens) != tokens:
            raise ValueError(f"{name}.tokens is {shown(entry['tokens'])}, its shards have {tokens}")


def check_shards(shards: Any, name: str) -> None:
    """Raise ValueError unless shards are files of the folder itself: an index from elsewhere must
    not read files outside of it."""
    if not isinstance(shards, list):
        raise ValueError(f"{name}.shards is {shown(shards)}, expected a list")
    for number, shard in enumerate(shards):
        place = f"{name}.shards[{number}]"
        if not isinstance(shard, dict):
            raise ValueError(f"{place} is {shown(shard)}")
        file = shard.get("file")
        if not isinstance(file, str) or Path(file).name != file or file == ".." or "\0" in file:
            raise ValueError(f"{place}.file is {shown(file)}, expected a file name in this folder")
        check_integer(shard.get("tokens"), 1, f"{place}.tokens")
        if not isinstance(shard.get("sha256"), str) or not SHA256.fullmatch(shard["sha256"]):
            raise ValueError(f"{place}.sha256 is {shown(shard.get('sha256'))}")


def check_integer(value: Any, least: int, name: str) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{name} is {shown(value)}, expected an integer of at least {least}")


def shown(value: Any) -> str:
    """A value in an error message, on one line and at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def open_shard(path: Path, tokens: int, dtype: np.dtype[Any]) -> TokenIds:
    """Memory-map a shard after checking its size."""
    try:
        found = path.stat()
        if not S_ISREG(found.st_mode):
            raise DataError(f"{path} is not a file")
        if found.st_size != tokens * dtype.itemsize:
            raise DataError(
                f"{path} is damaged: it has {found.st_size} bytes, the index says "
                f"{tokens * dtype.itemsize}"
            )
        return np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:
        raise DataError(f"{path} is missing or cannot be read: {error.strerror}") from None
