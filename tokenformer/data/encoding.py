"""Text to token ids, in this process (bytes) or in several (a tokenizer).

`encoded` takes chunks of pieces and gives their ids in the same order, whatever the number of
processes. Only so many chunks are under way at a time, so memory stays bounded.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tokenformer.data.byte_tokenizer import END_OF_TEXT
from tokenformer.data.documents import BEFORE_ALL, Position
from tokenformer.data.token_ids import TokenIds
from tokenformer.errors import DataError


class Encoder(Protocol):
    @property
    def dtype(self) -> np.dtype[Any]: ...

    def __call__(self, texts: list[bytes], ends: list[bool]) -> list[TokenIds]:
        """The ids of each text; those that end their document get the end-of-text token."""


@dataclass
class Chunk:
    """Consecutive pieces, and where the corpus stands after them."""

    position: Position = BEFORE_ALL
    read: int = 0
    """Bytes of the corpus's files read so far."""
    texts: list[bytes] = field(default_factory=list)
    ends: list[bool] = field(default_factory=list)
    """Which of the texts end their document."""
    splits: list[str] = field(default_factory=list)
    size: int = 0

    def add(self, text: bytes, ends: bool, split: str) -> None:
        self.texts.append(text)
        self.ends.append(ends)
        self.splits.append(split)
        self.size += len(text)


@dataclass(frozen=True)
class ByteEncoder:
    """Every byte is its own id."""

    dtype: np.dtype[Any]

    def __call__(self, texts: list[bytes], ends: list[bool]) -> list[TokenIds]:
        rows = []
        for text, end in zip(texts, ends, strict=True):
            row = np.empty(len(text) + end, dtype=self.dtype)
            row[: len(text)] = np.frombuffer(text, dtype=np.uint8)
            if end:
                row[-1] = END_OF_TEXT
            rows.append(row)
        return rows


@dataclass(frozen=True)
class TokenizerEncoder:
    """The ids of a tokenizer.json, and nothing but what the text says: a text that spells a special
    token is still text."""

    file: Path
    end_of_text: int
    dtype: np.dtype[Any]

    def __call__(self, texts: list[bytes], ends: list[bool]) -> list[TokenIds]:
        decoded = [text.decode("utf-8", errors="replace") for text in texts]
        # The fast variant leaves out the offsets of tokens in the text, which nobody reads here.
        encodings = loaded(self.file).encode_batch_fast(decoded, add_special_tokens=False)
        rows = []
        for encoding, end in zip(encodings, ends, strict=True):
            ids = encoding.ids
            if end:
                ids.append(self.end_of_text)
            rows.append(np.array(ids, dtype=self.dtype))
        return rows


@cache
def loaded(file: Path) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def encoded(
    chunks: Iterable[Chunk], encoder: Encoder, workers: int
) -> Iterator[tuple[Chunk, dict[str, TokenIds]]]:
    """The chunks in their order, each with the ids of its splits."""
    # Handing bytes to another process costs more than making them ids.
    if isinstance(encoder, ByteEncoder):
        for chunk in chunks:
            yield chunk, encode(encoder, chunk)
        return
    from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
    from multiprocessing import get_context

    # To fork a process that has threads is not safe, so workers are spawned.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), start_worker)
    under_way: deque[tuple[Chunk, Future[dict[str, TokenIds]]]] = deque()
    try:
        for chunk in chunks:
            under_way.append((chunk, pool.submit(encode, encoder, chunk)))
            if len(under_way) > 2 * workers:
                done, future = under_way.popleft()
                yield done, future.result()
        while under_way:
            done, future = under_way.popleft()
            yield done, future.result()
    except BrokenExecutor:
        raise DataError(
            f"one of {workers} encoding processes was killed, perhaps since memory ran out; run "
            "the same command again to continue, with fewer --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def encode(encoder: Encoder, chunk: Chunk) -> dict[str, TokenIds]:
    rows: dict[str, list[TokenIds]] = {}
    for split, ids in zip(chunk.splits, encoder(chunk.texts, chunk.ends), strict=True):
        rows.setdefault(split, []).append(ids)
    return {
        split: parts[0] if len(parts) == 1 else np.concatenate(parts)
        for split, parts in rows.items()
    }


def start_worker() -> None:
    """One thread to a worker; interrupts are its parent's, and it does not outlive a killed one."""
    from multiprocessing import connection, parent_process

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    if parent is None:
        return

    def wait() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
