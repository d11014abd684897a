"""Documents in blocks: where they are cut, and resuming from any position of any source."""

import gzip
import io
import json

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset

from tokenformer.data.documents import cut, place_to_cut, read_blocks
from tokenformer.data.sources import find_sources

DOCUMENTS = [f"document {number}\n" * (number * 7 % 11) for number in range(40)]


@pytest.fixture
def corpora(tmp_path, monkeypatch):
    """The same documents, some empty and some of several blocks, in every kind of file."""
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
def test_reading_resumes_after_any_block(corpora, name):
    prefix = "datasets:" if name == "dataset" else ""
    sources = find_sources(f"{prefix}{corpora / name}")
    blocks = list(read_blocks(sources, "text", {}, None))
    assert b"".join(block.text for block in blocks).decode() == "".join(DOCUMENTS)
    assert sum(block.starts for block in blocks) == sum(text != "" for text in DOCUMENTS)
    assert len(blocks) > 50
    for number in range(0, len(blocks), 5):
        rest = list(read_blocks(sources, "text", {}, blocks[number].position))
        assert rest == blocks[number + 1 :]


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 250, 1000])
def test_a_document_is_cut_into_blocks(monkeypatch, size):
    monkeypatch.setattr("tokenformer.data.documents.BLOCK_BYTES", 100)
    text = ("日本語 and\nother words,\n\n more" * 50).encode()[:size]
    parts = (("train", size // 2), ("validation", None))
    blocks = list(cut(io.BytesIO(text), parts))
    assert b"".join(block for block, _, _ in blocks) == text
    assert b"".join(block for block, split, _ in blocks if split == "train") == text[: size // 2]
    assert all(len(block) <= 100 for block, _, _ in blocks)
    assert [split for _, split, ends in blocks if ends] == ["train", "validation"]


def test_a_cut_splits_neither_words_nor_characters():
    text = b"one two\nthree four\n\n  five"
    assert text[: place_to_cut(text, 24)] == b"one two\nthree"  # blank lines are left together
    assert place_to_cut(b"aaa\nbbb ccc", 9) == 7  # before the space that belongs to ccc
    assert place_to_cut(b"aaaaaaaa\nb ccc", 12) == 9  # after the line break
    assert place_to_cut("aaaaa日本".encode(), 10) == 8
    assert place_to_cut(b"\x80" * 20, 10) == 10
