"""Reading goes on from any position, in every kind of source."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset

from tokenformer.data.documents import read_blocks
from tokenformer.data.sources import find_sources

DOCUMENTS = [f"document {number}\n" * (number * 7 % 11) for number in range(40)]


@pytest.fixture
def corpora(tmp_path, monkeypatch):
    """The same documents, some of them empty and some in several pieces, in every kind of file."""
    monkeypatch.setattr("tokenformer.data.documents.BLOCK_BYTES", 64)
    rows = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    table = pyarrow.table({"text": DOCUMENTS})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=7)
    Dataset.from_dict({"text": DOCUMENTS}).save_to_disk(tmp_path / "dataset")
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(DOCUMENTS):
        (tmp_path / "texts" / f"{number:02d}.txt").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    "name", ["rows.jsonl", "rows.jsonl.gz", "rows.parquet", "dataset", "texts"]
)
def test_reading_goes_on_after_any_piece(corpora, name):
    prefix = "datasets:" if name == "dataset" else ""
    sources = find_sources(f"{prefix}{corpora / name}")
    pieces = list(read_blocks(sources, "text", {}, None))
    assert b"".join(piece.text for piece in pieces).decode() == "".join(DOCUMENTS)
    assert sum(piece.starts for piece in pieces) == sum(text != "" for text in DOCUMENTS)
    assert len(pieces) > 50
    for number in range(0, len(pieces), 5):
        rest = list(read_blocks(sources, "text", {}, pieces[number].position))
        assert rest == pieces[number + 1 :]
