"""Writing shards so that a kill at any moment loses little and spoils nothing.

A `SplitWriter` appends ids to numbered shards and keeps their hashes. `sync` brings them to the
disk; after that its `state` may be written down, and a later writer made from it cuts off whatever
came after. Small files are written beside their name and renamed.
"""

import hashlib
import json
import os
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tokenformer.data.corpus import BLOCK
from tokenformer.data.token_ids import TokenIds
from tokenformer.errors import DataError
from tokenformer.files import write_atomic


@cache
def hasher() -> ThreadPoolExecutor:
    """Hashes beside the disk. One for the life of the process: a pool that dies while `prepare`
    runs can swallow a KeyboardInterrupt."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="sha256")


class SplitWriter:
    def __init__(
        self,
        folder: Path,
        split: str,
        dtype: np.dtype[Any],
        shard_tokens: int,
        state: dict[str, Any],
    ) -> None:
        self.folder = folder
        self.split = split
        self.dtype = dtype
        self.shard_tokens = shard_tokens
        self.documents: int = state.get("documents", 0)
        self.bytes: int = state.get("bytes", 0)
        self.finished: list[dict[str, Any]] = list(state.get("shards", []))
        self.tokens: int = state.get("open_tokens", 0)
        """In the shard that is open."""
        self.digest = hashlib.sha256()
        self.hashing: Future[None] | None = None
        self.file = self.reopened()

    def path(self) -> Path:
        return self.folder / f"{self.split}-{len(self.finished):05d}.bin"

    def reopened(self) -> Any:
        """The open shard, cut back to what the state says of it; nothing after it remains."""
        kept = {shard["file"] for shard in self.finished} | {self.path().name}
        for path in self.folder.glob(f"{self.split}-*.bin"):
            if path.name not in kept:
                path.unlink()
        size = self.tokens * self.dtype.itemsize
        if size == 0:
            return self.path().open("wb", buffering=0)
        try:
            file = self.path().open("r+b", buffering=0)
        except FileNotFoundError:
            raise DataError(
                f"{self.path()} is missing; remove {self.folder} and start anew"
            ) from None
        left = size
        while left and (block := file.read(min(left, BLOCK))):
            self.digest.update(block)
            left -= len(block)
        if left:
            file.close()
            raise DataError(f"{self.path()} is torn; remove {self.folder} and start anew")
        file.truncate(size)
        return file

    def write(self, ids: TokenIds) -> None:
        while len(ids):
            room = self.shard_tokens - self.tokens
            part = np.ascontiguousarray(ids[:room]).view(np.uint8).data
            self.wait_for_hash()  # of the part before: one waits at most
            self.hashing = hasher().submit(self.digest.update, part)
            written = 0
            while written < len(part):  # an unbuffered write may take less than it is given
                written += self.file.write(part[written:])
            self.tokens += min(room, len(ids))
            ids = ids[room:]
            if self.tokens == self.shard_tokens:
                self.close_shard()
                self.file = self.path().open("wb", buffering=0)

    def wait_for_hash(self) -> None:
        if self.hashing is not None:
            self.hashing.result()

    def close(self) -> None:
        """Let go of the open shard, without finishing it."""
        self.wait_for_hash()
        self.file.close()

    def close_shard(self) -> None:
        self.sync()
        self.wait_for_hash()
        self.file.close()
        if self.tokens == 0:
            self.path().unlink()
            return
        self.finished.append(
            {
                "file": self.path().name,
                "tokens": self.tokens,
                "sha256": self.digest.hexdigest(),
            }
        )
        self.tokens, self.digest = 0, hashlib.sha256()

    def sync(self) -> None:
        os.fsync(self.file.fileno())

    def state(self) -> dict[str, Any]:
        return {
            "documents": self.documents,
            "bytes": self.bytes,
            "shards": self.finished,
            "open_tokens": self.tokens,
        }

    def entry(self) -> dict[str, Any]:
        """Close the last shard; what the index says of the split."""
        self.close_shard()
        return {
            "tokens": sum(shard["tokens"] for shard in self.finished),
            "documents": self.documents,
            "bytes": self.bytes,
            "shards": self.finished,
        }


def write_json(path: Path, document: dict[str, Any]) -> None:
    write_atomic(path, json.dumps(document, indent=2) + "\n")
