"""Limits on decompression and on rows: no file fills the disk or the memory."""

import gzip
import io
import json
import zipfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.support.corpora import COMPRESSORS, prepared_text, zipped
from tokenformer.data.corpus import Corpus
from tokenformer.data.preparation import PrepareOptions, prepare
from tokenformer.data.text_encoding import ReadOptions
from tokenformer.errors import DataError


def bomb(name: str) -> bytes:
    """17.6 MB of the same line, compressed more than 500 times."""
    content = b"aaaaaaaaaaaaaaa\n" * 1_100_000
    if name.endswith(".zip"):
        return zipped(**{"a.txt": content})
    for suffix in Path(name).suffixes[1:]:
        content = COMPRESSORS[suffix](content)
    return content


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.bz2", "a.txt.xz.gz", "a.txt.zst", "a.zip"])
def test_a_decompression_bomb_is_refused_unless_allowed(tmp_path, name):
    (tmp_path / name).write_bytes(bomb(name))
    with pytest.raises(DataError, match=r"unpacks to more than 100 times .*--max_ratio 1000, or"):
        prepared_text(tmp_path / name, tmp_path / "out")
    assert not (tmp_path / "out").exists(), "nothing is written"
    prepare(
        PrepareOptions(str(tmp_path / name), read_options=ReadOptions(max_ratio=0)),
        tmp_path / "out",
    )
    assert Corpus(tmp_path / "out").split("train").bytes > 16_000_000


def test_a_decompression_bomb_of_rows_is_refused(tmp_path):
    rows = json.dumps({"text": "a" * 100_000}).encode() + b"\n"
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(rows * 250))
    table = pyarrow.table({"text": ["a" * 100_000] * 250})
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    for name in ("a.jsonl.gz", "b.parquet"):
        with pytest.raises(DataError, match=f"{name} unpacks to more than 100 times"):
            prepared_text(tmp_path / name, tmp_path / f"out-{name}")


def test_a_dictionary_encoded_bomb_is_refused_before_it_fills_the_memory(tmp_path):
    """128 rows of 8 MB, 1 GB in all, in a file of less than 1 kB."""
    numbers = pyarrow.array([0] * 128, pyarrow.int32())
    repeated = pyarrow.DictionaryArray.from_arrays(numbers, pyarrow.array(["a" * 8_000_000]))
    path = tmp_path / "a.parquet"
    options = {"compression": "zstd", "store_schema": False}
    pyarrow.parquet.write_table(pyarrow.table({"text": repeated}), path, **options)
    assert path.stat().st_size < 2000
    default = pyarrow.default_memory_pool()
    counted = pyarrow.proxy_memory_pool(default)
    pyarrow.set_memory_pool(counted)
    try:
        with pytest.raises(DataError, match=r"a.parquet unpacks to more than 100 times"):
            prepared_text(path, tmp_path / "out")
    finally:
        pyarrow.set_memory_pool(default)
    assert 8_000_000 < counted.max_memory() < 200_000_000


def test_an_archive_whose_members_overlap_is_refused(tmp_path):
    """A zip bomb without nesting: one block of data with many names."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.txt", "a line of text\n" * 50)
        entry = archive.infolist()[0]
        for number in range(5):
            copy = zipfile.ZipInfo(f"{number}.txt")
            for field in ("header_offset", "CRC", "compress_size", "file_size"):
                setattr(copy, field, getattr(entry, field))
            archive.filelist.append(copy)
    (tmp_path / "a.zip").write_bytes(buffer.getvalue())
    with pytest.raises(DataError, match="members that overlap"):
        prepared_text(tmp_path / "a.zip", tmp_path / "out")


def test_a_row_that_is_too_long_is_an_error_that_names_it(tmp_path):
    rows = [json.dumps({"text": text}) + "\n" for text in ("short", "long" * 100)]
    (tmp_path / "a.jsonl").write_text("".join(rows))
    table = pyarrow.table({"text": ["short", "long" * 100]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    for name, place in (("a.jsonl", "line 2"), ("a.parquet", "row 1")):
        with pytest.raises(DataError, match=f"{name}, {place} is longer than 200 bytes"):
            prepared_text(tmp_path / name, tmp_path / f"short-{name}", max_row_bytes=200)
        prepare(PrepareOptions(str(tmp_path / name)), tmp_path / f"{name}-out")
