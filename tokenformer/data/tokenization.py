"""Text to token ids: bytes in this process, a tokenizer in several.

`encode_chunks` returns ids in the order of the chunks, whatever the number of processes. The number
of chunks in flight is limited, so memory stays bounded.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tokenformer.data.byte_tokenizer import END_OF_TEXT
from tokenformer.data.corpus import TokenIds
from tokenformer.data.documents import START, Position
from tokenformer.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Encoder(Protocol):
    @property
    def dtype(self) -> np.dtype[Any]: ...

    def __call__(self, texts: list[bytes], ends: list[bool]) -> list[TokenIds]:
        """Return the ids of each text, with the end-of-text token where a document ends."""


@dataclass
class Chunk:
    """Consecutive blocks of text, and the position in the corpus after them."""

    position: Position = START
    bytes_read: int = 0
    """Bytes of the corpus's files read so far."""
    texts: list[bytes] = field(default_factory=list)
    ends: list[bool] = field(default_factory=list)
    """Whether each text ends its document."""
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
    """The ids of a tokenizer.json. Text that spells a special token is encoded as ordinary text."""

    file: Path
    end_of_text: int
    dtype: np.dtype[Any]

    def __call__(self, texts: list[bytes], ends: list[bool]) -> list[TokenIds]:
        decoded = [text.decode("utf-8", errors="replace") for text in texts]
        # The fast variant does not compute offsets, which are not needed here.
        encodings = load_backend(self.file).encode_batch_fast(decoded, add_special_tokens=False)
        rows = []
        for encoding, end in zip(encodings, ends, strict=True):
            ids = encoding.ids
            if end:
                ids.append(self.end_of_text)
            rows.append(np.array(ids, dtype=self.dtype))
        return rows


@cache
def load_backend(file: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode_chunks(
    chunks: Iterable[Chunk], encoder: Encoder, workers: int
) -> Iterator[tuple[Chunk, dict[str, TokenIds]]]:
    """Yield the chunks in order, each with its ids by split."""
    # Sending bytes to another process costs more than converting them to ids.
    if isinstance(encoder, ByteEncoder):
        for chunk in chunks:
            yield chunk, encode_chunk(encoder, chunk)
        return
    from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
    from multiprocessing import get_context

    # Forking a process with threads is not safe, so workers are spawned.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), start_worker)
    in_flight: deque[tuple[Chunk, Future[dict[str, TokenIds]]]] = deque()
    try:
        for chunk in chunks:
            in_flight.append((chunk, pool.submit(encode_chunk, encoder, chunk)))
            if len(in_flight) > 2 * workers:
                done, future = in_flight.popleft()
                yield done, future.result()
        while in_flight:
            done, future = in_flight.popleft()
            yield done, future.result()
    except BrokenExecutor:
        raise DataError(
            f"one of {workers} encoding processes was killed, perhaps because memory ran out; run "
            "the same command again with fewer --workers to resume"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def encode_chunk(encoder: Encoder, chunk: Chunk) -> dict[str, TokenIds]:
    rows: dict[str, list[TokenIds]] = {}
    for split, ids in zip(chunk.splits, encoder(chunk.texts, chunk.ends), strict=True):
        rows.setdefault(split, []).append(ids)
    return {
        split: parts[0] if len(parts) == 1 else np.concatenate(parts)
        for split, parts in rows.items()
    }


def start_worker() -> None:
    """Run one thread per worker, leave Ctrl-C to the parent, and exit if the parent is killed."""
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
