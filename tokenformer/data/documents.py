"""Documents as pieces of bounded size, and the split that each belongs to.

A document is a text file, or a row of jsonl, parquet or a dataset. It is handed on in pieces of at
most PIECE bytes, so that memory does not grow with the corpus. A piece ends where tokenizers of
the GPT-2 family start a new word anyway: after a line break between two characters that are no
spaces. The pieces of a document give the ids of the whole.
"""

import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import IO, Any, NamedTuple

from tokenformer.data.packaging import ALWAYS_ALLOWED, readable, too_much
from tokenformer.data.sources import Source, one_line
from tokenformer.errors import DataError

PIECE = 1 << 18
ROWS_AT_ONCE = 4
"""Of parquet, in memory: a dictionary lets a few bytes stand for many rows of any length."""
DEFAULT_FRACTION = 0.05  # of documents held out; the paper's, on OpenWebText
STANDARD_SIZE = 100_000_000  # of enwik8 and text8, whatever they are called and packed in
STANDARD_PARTS = (("train", 90_000_000), ("validation", 95_000_000), ("test", None))

Parts = tuple[tuple[str | None, int | None], ...]
"""Splits of one long document, each with the offset at which it ends; None: at the very end."""
WHOLE: Parts = ((None, None),)


class Position(NamedTuple):
    """Of a piece: which of the sources, which of its documents, which piece of that."""

    source: int
    document: int
    piece: int


BEFORE_ALL = Position(0, 0, -1)


class Piece(NamedTuple):
    position: Position
    text: bytes
    split: str | None
    """Where the document itself says; else the division decides."""
    starts: bool
    """Whether the split changes here: the piece starts a document, or a part of one."""
    ends: bool
    read: int
    """Bytes of the source's file read so far, for the progress bar."""


@dataclass
class Division:
    """Which documents are held out: those whose hash falls below a threshold.

    The hash is of the text (of its first piece) and the seed. So the split depends neither on the
    order of documents nor on who reads them, and two copies of a text fall on the same side.
    """

    seed: int
    threshold: int

    @classmethod
    def of_fraction(cls, fraction: float, seed: int) -> "Division":
        return cls(seed, int(fraction * 2**64))

    def hash_of(self, text: bytes) -> int:
        digest = hashlib.blake2b(text, digest_size=8, key=self.seed.to_bytes(8, "little"))
        return int.from_bytes(digest.digest(), "little")


def read_pieces(
    sources: list[Source], field: str, parts: Mapping[int, Parts], after: Position | None
) -> Iterator[Piece]:
    """The pieces of all sources in order, from the one after `after` on.

    `parts` divide texts, by the number of the source; a row is divided only if it is a standard
    corpus.
    """
    first = after or BEFORE_ALL
    for number in range(first.source, len(sources)):
        source = sources[number]
        start = first.document if number == first.source else 0
        with readable(source.name):
            divided = parts.get(number, WHOLE)
            for piece in source_pieces(number, source, field, divided, start):
                if after is None or piece.position > after:
                    yield piece


def source_pieces(
    number: int, source: Source, field: str, parts: Parts, first: int
) -> Iterator[Piece]:
    if source.kind == "text":
        with source.opened() as (stream, file):
            yield from document_pieces(number, 0, stream, parts, file)
        return
    for document, text, read in rows(source, field, first):
        whole = STANDARD_PARTS if len(text) == STANDARD_SIZE else WHOLE
        yield from document_pieces(number, document, io.BytesIO(text), whole, read)


def document_pieces(
    source: int, document: int, stream: IO[bytes], parts: Parts, read: IO[bytes] | int
) -> Iterator[Piece]:
    starts = True
    for number, (text, split, ends) in enumerate(cut(stream, parts)):
        position = Position(source, document, number)
        done = read if isinstance(read, int) else read.tell()
        if text or not starts:  # an empty document is none
            yield Piece(position, text, split, starts, ends, done)
        starts = ends


def cut(stream: IO[bytes], parts: Parts) -> Iterator[tuple[bytes, str | None, bool]]:
    """Pieces of a document with the split of the part they lie in; True where a part ends."""
    buffer, offset = b"", 0
    for split, end in parts:
        ends = False
        while not ends:
            most = PIECE if end is None else min(PIECE, end - offset)
            # One byte more than a piece tells whether this is the last.
            while len(buffer) <= most and (block := stream.read(most + 1 - len(buffer))):
                buffer += block
            if len(buffer) <= most:
                size, ends = len(buffer), True
            elif end is not None and offset + most == end:
                size, ends = most, True
            else:
                size = place_to_cut(buffer, most)
            yield buffer[:size], split, ends
            buffer, offset = buffer[size:], offset + size


def place_to_cut(text: bytes, most: int) -> int:
    """At most `most`, which must be less than the text's length."""
    for mark, after in ((b"\n", 1), (b" ", 0)):  # a space belongs to the word that follows it
        place = text.rfind(mark, most // 2, most)
        while place > 0:
            if not text[place - 1 : place].isspace() and not text[place + 1 : place + 2].isspace():
                return place + after
            place = text.rfind(mark, most // 2, place)
    size = most
    while size > most - 4 and text[size] & 0xC0 == 0x80:  # inside a UTF-8 character
        size -= 1
    return size if text[size] & 0xC0 != 0x80 else most


def rows(source: Source, field: str, first: int) -> Iterator[tuple[int, bytes, int]]:
    """The documents from number `first` on: number, text, bytes of the file read so far."""
    if source.kind == "jsonl":
        yield from jsonl_rows(source, field, first)
    elif source.kind == "parquet":
        yield from parquet_rows(source, field, first)
    else:
        yield from dataset_rows(source, field, first)


def jsonl_rows(source: Source, field: str, first: int) -> Iterator[tuple[int, bytes, int]]:
    most = source.reading.max_row_bytes
    with source.opened() as (stream, file):
        for number in count():
            line = stream.readline(most + 1)
            if not line:
                return
            place = f"{source.name}, line {number + 1}"
            check_row(len(line), most, place)
            if number < first or not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{place} is not JSON: {one_line(error)}") from None
            yield number, text_of(row, field, place), file.tell()


def check_row(size: int, most: int, place: str) -> None:
    if size > most:
        raise DataError(
            f"{place} is longer than {most:,} bytes and would have to be held in memory; allow "
            "longer rows by --max_row_bytes"
        )


def parquet_rows(source: Source, field: str, first: int) -> Iterator[tuple[int, bytes, int]]:
    import pyarrow
    import pyarrow.parquet

    if source.member is not None:
        raise DataError(f"{source.name}: parquet cannot be read out of an archive; unpack it")
    try:
        # Pages are read as they are needed: a row group may be larger than memory allows.
        table = pyarrow.parquet.ParquetFile(source.path, pre_buffer=False, buffer_size=1 << 20)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{source.name} is not parquet: {one_line(error)}") from None
    with table:
        if field not in table.schema_arrow.names:
            raise DataError(no_field(source.name, field, table.schema_arrow.names))
        try:
            yield from table_rows(source, table, field, first)
        except (pyarrow.ArrowException, UnicodeDecodeError) as error:
            raise DataError(f"{source.name} cannot be read: {one_line(error)}") from None


def table_rows(
    source: Source, table: Any, field: str, first: int
) -> Iterator[tuple[int, bytes, int]]:
    """Rows of an open parquet file. Its compression is inside, so the ratio is counted by text."""
    reading = source.reading
    allowed = max(ALWAYS_ALLOWED, reading.max_ratio * source.size)
    total, number = max(1, table.metadata.num_rows), 0
    for group in range(table.num_row_groups):
        rows_here = table.metadata.row_group(group).num_rows
        if number + rows_here <= first:
            number += rows_here
            continue
        for batch in table.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=[field]):
            for value in batch.column(0):
                if number >= first:
                    place = f"{source.name}, row {number}"
                    text = text_of({field: value.as_py()}, field, place)
                    check_row(len(text), reading.max_row_bytes, place)
                    allowed -= len(text)
                    if allowed < 0 and reading.max_ratio:
                        raise DataError(too_much(source.name, source.size, reading.max_ratio))
                    yield number, text, source.size * (number + 1) // total
                number += 1


def dataset_rows(source: Source, field: str, first: int) -> Iterator[tuple[int, bytes, int]]:
    remaining = iter(source.rows.skip(first) if first else source.rows)
    for number in count(first):
        place = f"{source.name}, row {number}"
        try:
            row = next(remaining)
        except StopIteration:
            return
        except Exception as error:  # whatever a hub, a network or a loader may raise
            raise DataError(f"{place} cannot be read: {one_line(error)}") from None
        text = text_of(row, field, place)
        check_row(len(text), source.reading.max_row_bytes, place)
        yield number, text, 0


def text_of(row: Any, field: str, place: str) -> bytes:
    if not isinstance(row, dict) or field not in row:
        raise DataError(no_field(place, field, list(row) if isinstance(row, dict) else []))
    text = row[field]
    if text is None:
        return b""
    if not isinstance(text, str):
        raise DataError(f"{place}: the field {field!r} holds {type(text).__name__}, not text")
    return text.encode("utf-8", errors="replace")  # JSON can spell half a surrogate pair


def no_field(place: str, field: str, names: list[str]) -> str:
    have = ", ".join(map(repr, names[:20])) or "none"
    return (
        f"{place} has no field {field!r} but {have}; name the one that holds text by --text_field"
    )


def parts_of(source: Source, fraction: float | None, *, standard: bool = True) -> Parts:
    """How a text that is all there is to train on is divided: as is standard if it has the standard
    size and no fraction is asked for, else its end is held out, from the start of a line on."""
    size = content_size(source)
    if standard and size == STANDARD_SIZE and fraction is None:
        return STANDARD_PARTS
    held_out = DEFAULT_FRACTION if fraction is None else fraction
    if not held_out:
        return (("train", None),)
    return (("train", line_start(source, size - int(size * held_out))), ("validation", None))


def content_size(source: Source) -> int:
    if source.is_plain():
        return source.size
    with readable(source.name), source.opened() as (stream, _):
        size = 0
        while block := stream.read(1 << 20):
            size += len(block)
        return size


def line_start(source: Source, offset: int) -> int:
    """The first start of a line at or after `offset`; `offset` itself if there is none near."""
    before = max(0, offset - 1)  # a line break there makes `offset` itself a start
    with readable(source.name), source.opened() as (stream, file):
        if source.is_plain():
            file.seek(before)
            stream = file
        else:
            skip(stream, before)
        text = b""
        while len(text) < PIECE and (block := stream.read(PIECE - len(text))):
            text += block
    found = text.find(b"\n")
    if 0 <= found < len(text) - 1:
        return before + found + 1
    start = offset - before
    while start < len(text) and text[start] & 0xC0 == 0x80:  # inside a UTF-8 character
        start += 1
    return before + start


def skip(stream: IO[bytes], size: int) -> None:
    while size and (block := stream.read(min(size, 1 << 20))):
        size -= len(block)
