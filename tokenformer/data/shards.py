"""Writing shards of token ids so that a killed process loses little work and resumes.

A `ShardWriter` appends ids to the numbered shards of a split and hashes them. After `sync`, its
`state` may be saved; a writer created from that state truncates everything written later.
"""

import hashlib
import json
import os
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tokenformer.data.corpus import TokenIds
from tokenformer.errors import DataError
from tokenformer.files import write_atomic

READ_BYTES = 1 << 22


@cache
def hash_executor() -> ThreadPoolExecutor:
    """The thread that hashes while the disk writes. It lives as long as the process, because a pool
    that is garbage-collected while `prepare` runs can swallow a KeyboardInterrupt."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="sha256")


class ShardWriter:
    """The writer of one split. `state` is {} for a new split."""

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
        """Tokens in the open shard."""
        self.digest = hashlib.sha256()
        self.hashing: Future[None] | None = None
        self.file = self.open_shard()

    def path(self) -> Path:
        return self.folder / f"{self.split}-{len(self.finished):05d}.bin"

    def open_shard(self) -> Any:
        """Open the current shard truncated to the size in the state; delete later shards."""
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
                f"{self.path()} is missing; remove {self.folder} and start again"
            ) from None
        left = size
        while left and (block := file.read(min(left, READ_BYTES))):
            self.digest.update(block)
            left -= len(block)
        if left:
            file.close()
            raise DataError(f"{self.path()} is truncated; remove {self.folder} and start again")
        file.truncate(size)
        return file

    def write(self, ids: TokenIds) -> None:
        while len(ids):
            free = self.shard_tokens - self.tokens
            part = np.ascontiguousarray(ids[:free]).view(np.uint8).data
            self.wait_for_hash()  # of the previous part, so that at most one is waiting
            self.hashing = hash_executor().submit(self.digest.update, part)
            written = 0
            while written < len(part):  # an unbuffered write may write less than it is given
                written += self.file.write(part[written:])
            self.tokens += min(free, len(ids))
            ids = ids[free:]
            if self.tokens == self.shard_tokens:
                self.finish_shard()
                self.file = self.path().open("wb", buffering=0)

    def wait_for_hash(self) -> None:
        if self.hashing is not None:
            self.hashing.result()

    def close(self) -> None:
        """Close the open shard without finishing it."""
        self.wait_for_hash()
        self.file.close()

    def finish_shard(self) -> None:
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

    def finish(self) -> dict[str, Any]:
        """Finish the last shard and return the split's entry in the index."""
        self.finish_shard()
        return {
            "tokens": sum(shard["tokens"] for shard in self.finished),
            "documents": self.documents,
            "bytes": self.bytes,
            "shards": self.finished,
        }


def write_json(path: Path, document: dict[str, Any]) -> None:
    write_atomic(path, json.dumps(document, indent=2) + "\n")
