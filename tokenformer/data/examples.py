"""Prepared examples: a corpus whose documents are prompts with completions.

    examples = ExampleSplit(Corpus("data/chats"), "train")
    batch = examples.batch(length=512, seed=0, first_sample=0, count=8)        # [8, T + 1]

The token ids are those of an ordinary corpus, one example after the other. Beside them are two
files: the offset at which each example starts, and for each token whether it is trained. In a batch
a token without a loss is `~id`, a negative number. A batch has one example per row, padded at the
end to its longest row.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenformer.data.corpus import SHA256, Corpus, Split, check_integer, open_shard
from tokenformer.data.order import random_starts, shuffled_indices
from tokenformer.errors import DataError

Batch = npt.NDArray[np.int64]

EXAMPLES = "examples"
"""The key of a split in the index that only a corpus of examples has."""
OFFSET, FLAG = np.dtype("<i8"), np.dtype("u1")
PADDING = ~0


class ExampleSplit:
    """One split of a corpus of examples."""

    def __init__(self, corpus: Corpus, name: str) -> None:
        self.split = corpus.split(name)
        entry = corpus.index["splits"][name][EXAMPLES]
        try:
            check_entry(entry)
        except ValueError as error:
            raise DataError(
                f"{corpus.folder}: {EXAMPLES} of split {name} are not valid: {error}; prepare the "
                "corpus again"
            ) from None
        self.count: int = entry["count"]
        self.trained_tokens: int = entry["trained_tokens"]
        """Tokens with a loss, before any example is truncated."""
        self.trained_bytes: int = entry["trained_bytes"]
        folder = corpus.folder
        self.starts = open_shard(folder / entry["starts"]["file"], self.count + 1, OFFSET)
        self.trained = open_shard(folder / entry["trained"]["file"], len(self.split), FLAG)

    def __str__(self) -> str:
        return str(self.split)

    def __len__(self) -> int:
        """Return the number of tokens, as for a `Split`."""
        return len(self.split)

    def count_longer(self, length: int) -> int:
        """Return how many examples are truncated to `length` inputs and their targets."""
        return int((np.diff(self.starts) > length + 1).sum())

    def row(self, index: int, length: int) -> Batch:
        """Return one example as at most `length` + 1 numbers. If it is longer, the start of its
        prompt is left out, then the end of its last completion."""
        start, end = int(self.starts[index]), int(self.starts[index + 1])
        ids = self.split[start:end].astype(np.int64)
        trained = self.trained[start:end] != 0
        row: Batch = np.where(trained, ids, ~ids)
        prompt = int(trained.argmax())  # at least 1: an example starts with a prompt
        left_out = min(max(0, len(row) - length - 1), prompt - 1)
        return row[left_out : left_out + length + 1]

    def rows(self, indices: list[int], length: int) -> Batch:
        found = [self.row(index, length) for index in indices]
        width = max(len(row) for row in found)
        batch = np.full((len(found), width), PADDING, dtype=np.int64)
        for target, row in zip(batch, found, strict=True):
            target[: len(row)] = row
        return batch  # [B, T + 1]

    def batch(
        self, *, length: int, seed: int, first_sample: int, count: int, mode: str = "epochs"
    ) -> Batch:
        """Return samples first_sample .. first_sample + count - 1; a pure function of them and the
        seed."""
        if mode == "epochs":
            indices = shuffled_indices(self.count, seed, first_sample, count)
        else:
            indices = random_starts(self.count, seed, first_sample, count)
        return self.rows(indices.tolist(), length)

    def fixed_batches(self, *, batch_size: int, length: int, count: int) -> list[Batch]:
        """Return at most `count` examples spread evenly, the same on every call: for validation."""
        count = min(count, self.count)
        indices = [i * (self.count - 1) // max(1, count - 1) for i in range(count)]
        return [
            self.rows(indices[first : first + batch_size], length)
            for first in range(0, count, batch_size)
        ]


def open_split(corpus: Corpus, name: str) -> Split | ExampleSplit:
    """Open a split of text or of examples."""
    if EXAMPLES in corpus.index["splits"].get(name, {}):
        return ExampleSplit(corpus, name)
    return corpus.split(name)


def check_entry(entry: Any) -> None:
    """Raise ValueError unless every required field exists and has the right type."""
    if not isinstance(entry, dict):
        raise ValueError(f"they are {entry!r:.60}")
    check_integer(entry.get("count"), 1, "count")
    for name in ("trained_tokens", "trained_bytes"):
        check_integer(entry.get(name), 1, name)
    for name in ("starts", "trained"):
        part = entry.get(name)
        if not isinstance(part, dict):
            raise ValueError(f"{name} is {part!r:.60}")
        file = part.get("file")
        if not isinstance(file, str) or Path(file).name != file or file == ".." or "\0" in file:
            raise ValueError(f"{name}.file is {file!r:.60}, expected a file name in this folder")
        if not isinstance(part.get("sha256"), str) or not SHA256.fullmatch(part["sha256"]):
            raise ValueError(f"{name}.sha256 is {part.get('sha256')!r:.60}")
