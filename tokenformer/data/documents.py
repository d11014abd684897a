"""Documents in blocks of bounded size.

A document is a text file, or a row of jsonl, parquet or a dataset. It is read in blocks of at most
BLOCK_BYTES, so memory does not grow with the corpus. A block ends where tokenizers of the GPT-2
family start a new word anyway: after a line break between two characters that are not white space.
So encoding the blocks gives the same ids as encoding the whole document.
"""

import io
import json
from collections.abc import Iterator, Mapping
from itertools import count
from typing import IO, Any, NamedTuple

from tokenformer.data.compression import MIN_LIMIT, limit_message, read_errors
from tokenformer.data.sources import Source
from tokenformer.data.splits import STANDARD_BOUNDARIES, STANDARD_SIZE, UNSPLIT, Boundaries
from tokenformer.errors import DataError, one_line

BLOCK_BYTES = 1 << 18
PARQUET_ROWS = 4
"""Rows of parquet in memory: a dictionary lets a few bytes stand for many rows of any length."""


class Position(NamedTuple):
    """The place of a block in the corpus."""

    source: int
    document: int
    block: int


START = Position(0, 0, -1)


class TextBlock(NamedTuple):
    position: Position
    text: bytes
    split: str | None
    """The split, if the document's boundaries give one."""
    starts: bool
    """Whether this is the first block of a document, or of one split of it."""
    ends: bool
    bytes_read: int
    """Bytes of the source's file read so far, for the progress bar."""


def read_blocks(
    sources: list[Source], field: str, boundaries: Mapping[int, Boundaries], after: Position | None
) -> Iterator[TextBlock]:
    """Yield the blocks of all sources in order, starting after the position `after`.

    `boundaries` maps the index of a text source to its splits. A row is split only if it is a
    standard corpus.
    """
    first = after or START
    for number in range(first.source, len(sources)):
        source = sources[number]
        start = first.document if number == first.source else 0
        with read_errors(source.name):
            splits = boundaries.get(number, UNSPLIT)
            for block in source_blocks(number, source, field, splits, start):
                if after is None or block.position > after:
                    yield block


def source_blocks(
    number: int, source: Source, field: str, boundaries: Boundaries, first: int
) -> Iterator[TextBlock]:
    if source.kind == "text":
        with source.open() as (stream, file):
            yield from document_blocks(number, 0, stream, boundaries, file)
        return
    for document, text, bytes_read in read_rows(source, field, first):
        splits = STANDARD_BOUNDARIES if len(text) == STANDARD_SIZE else UNSPLIT
        yield from document_blocks(number, document, io.BytesIO(text), splits, bytes_read)


def document_blocks(
    source: int,
    document: int,
    stream: IO[bytes],
    boundaries: Boundaries,
    progress: IO[bytes] | int,
) -> Iterator[TextBlock]:
    """Yield the blocks of one document; `progress` is the file being read, or the bytes read."""
    starts = True
    for number, (text, split, ends) in enumerate(cut(stream, boundaries)):
        position = Position(source, document, number)
        bytes_read = progress if isinstance(progress, int) else progress.tell()
        if text or not starts:  # empty documents are skipped
            yield TextBlock(position, text, split, starts, ends, bytes_read)
        starts = ends


def cut(stream: IO[bytes], boundaries: Boundaries) -> Iterator[tuple[bytes, str | None, bool]]:
    """Cut a document into blocks; yield each with its split and whether it ends that split."""
    buffer, offset = b"", 0
    for split, end in boundaries:
        ends = False
        while not ends:
            limit = BLOCK_BYTES if end is None else min(BLOCK_BYTES, end - offset)
            # Read one byte more than a block to know whether this is the last one.
            while len(buffer) <= limit and (data := stream.read(limit + 1 - len(buffer))):
                buffer += data
            if len(buffer) <= limit:
                size, ends = len(buffer), True
            elif end is not None and offset + limit == end:
                size, ends = limit, True
            else:
                size = place_to_cut(buffer, limit)
            yield buffer[:size], split, ends
            buffer, offset = buffer[size:], offset + size


def place_to_cut(text: bytes, limit: int) -> int:
    """Return where to cut `text`: at most `limit`, which must be less than its length."""
    for mark, after in ((b"\n", 1), (b" ", 0)):  # a space belongs to the word after it
        place = text.rfind(mark, limit // 2, limit)
        while place > 0:
            if not text[place - 1 : place].isspace() and not text[place + 1 : place + 2].isspace():
                return place + after
            place = text.rfind(mark, limit // 2, place)
    size = limit
    while size > limit - 4 and text[size] & 0xC0 == 0x80:  # inside a UTF-8 character
        size -= 1
    return size if text[size] & 0xC0 != 0x80 else limit


def read_rows(source: Source, field: str, first: int) -> Iterator[tuple[int, bytes, int]]:
    """Yield the documents from number `first`: number, text, bytes of the file read so far."""
    if source.kind == "jsonl":
        yield from jsonl_rows(source, field, first)
    elif source.kind == "parquet":
        yield from parquet_rows(source, field, first)
    else:
        yield from dataset_rows(source, field, first)


def jsonl_rows(source: Source, field: str, first: int) -> Iterator[tuple[int, bytes, int]]:
    limit = source.read_options.max_row_bytes
    with source.open() as (stream, file):
        for number in count():
            line = stream.readline(limit + 1)
            if not line:
                return
            place = f"{source.name}, line {number + 1}"
            check_row_size(len(line), limit, place)
            if number < first or not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{place} is not JSON: {one_line(error)}") from None
            yield number, row_text(row, field, place), file.tell()


def check_row_size(size: int, limit: int, place: str) -> None:
    if size > limit:
        raise DataError(
            f"{place} is longer than {limit:,} bytes, and a row must fit in memory; allow longer "
            "rows with --max_row_bytes"
        )


def parquet_rows(source: Source, field: str, first: int) -> Iterator[tuple[int, bytes, int]]:
    import pyarrow
    import pyarrow.parquet

    if source.member is not None:
        raise DataError(f"{source.name}: parquet in an archive is not supported; unpack it")
    try:
        # Read pages as they are needed: a row group may be larger than memory.
        table = pyarrow.parquet.ParquetFile(source.path, pre_buffer=False, buffer_size=1 << 20)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{source.name} is not parquet: {one_line(error)}") from None
    with table:
        if field not in table.schema_arrow.names:
            raise DataError(no_field_message(source.name, field, table.schema_arrow.names))
        try:
            yield from table_rows(source, table, field, first)
        except (pyarrow.ArrowException, UnicodeDecodeError) as error:
            raise DataError(f"{source.name} cannot be read: {one_line(error)}") from None


def table_rows(
    source: Source, table: Any, field: str, first: int
) -> Iterator[tuple[int, bytes, int]]:
    """Yield the rows of an open `pyarrow.parquet.ParquetFile`. Parquet is compressed inside, so the
    decompression limit counts the bytes of text."""
    options = source.read_options
    left = max(MIN_LIMIT, options.max_ratio * source.size)
    total, number = max(1, table.metadata.num_rows), 0
    for group in range(table.num_row_groups):
        group_rows = table.metadata.row_group(group).num_rows
        if number + group_rows <= first:
            number += group_rows
            continue
        for batch in table.iter_batches(PARQUET_ROWS, row_groups=[group], columns=[field]):
            for value in batch.column(0):
                if number >= first:
                    place = f"{source.name}, row {number}"
                    text = row_text({field: value.as_py()}, field, place)
                    check_row_size(len(text), options.max_row_bytes, place)
                    left -= len(text)
                    if left < 0 and options.max_ratio:
                        raise DataError(limit_message(source.name, source.size, options.max_ratio))
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
        except Exception as error:  # hub, network and loaders raise anything
            raise DataError(f"{place} cannot be read: {one_line(error)}") from None
        text = row_text(row, field, place)
        check_row_size(len(text), source.read_options.max_row_bytes, place)
        yield number, text, 0


def row_text(row: Any, field: str, place: str) -> bytes:
    if not isinstance(row, dict) or field not in row:
        raise DataError(no_field_message(place, field, list(row) if isinstance(row, dict) else []))
    text = row[field]
    if text is None:
        return b""
    if not isinstance(text, str):
        raise DataError(f"{place}: the field {field!r} holds {type(text).__name__}, not text")
    return text.encode("utf-8", errors="replace")  # JSON can contain half a surrogate pair


def no_field_message(place: str, field: str, names: list[str]) -> str:
    have = ", ".join(map(repr, names[:20])) or "none"
    return (
        f"{place} has no field {field!r}; its fields are {have}; name the one with the text with "
        "--text_field"
    )
