"""Text encodings: conversion to UTF-8, and errors for invalid bytes."""

import codecs
import gzip
import io
import json

import pyarrow
import pyarrow.parquet
import pytest

from tests.support.corpora import prepared_text
from tokenformer.data.corpus import Corpus
from tokenformer.data.preparation import PrepareOptions, prepare
from tokenformer.data.text_encoding import ReadOptions, as_utf8
from tokenformer.errors import DataError

TEXT = "naïve café 日本語 🙂\n" * 50


@pytest.mark.parametrize(
    ("encoding", "mark"),
    [
        ("utf-8", b""),
        ("utf-8", codecs.BOM_UTF8),
        ("utf-16-le", codecs.BOM_UTF16_LE),
        ("utf-16-be", codecs.BOM_UTF16_BE),
        ("utf-32-le", codecs.BOM_UTF32_LE),
        ("utf-32-be", codecs.BOM_UTF32_BE),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_byte_order_mark_selects_the_encoding(tmp_path, encoding, mark, suffix):
    content = mark + TEXT.encode(encoding)
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    assert prepared_text(path, tmp_path / "out") == TEXT


def test_a_split_by_position_counts_text_not_file_bytes(tmp_path):
    for name, content in (("8", TEXT.encode()), ("16", TEXT.encode("utf-16"))):
        (tmp_path / f"{name}.txt").write_bytes(content)
        prepare(PrepareOptions(str(tmp_path / f"{name}.txt"), validation=0.2), tmp_path / name)
    assert Corpus(tmp_path / "8").index["splits"] == Corpus(tmp_path / "16").index["splits"]


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16-le", "shift_jis"])
def test_text_in_a_given_encoding(tmp_path, encoding):
    text = "日本\n" * 20 if encoding == "shift_jis" else "naïve café\n" * 20
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    with pytest.raises(DataError, match=r"a.txt (is not utf-8: byte 0x|has a zero byte at offset)"):
        prepared_text(tmp_path / "a.txt", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert prepared_text(tmp_path / "a.txt", tmp_path / "out", encoding=encoding) == text
    with pytest.raises(DataError, match=f"was made with --encoding {encoding}, not utf-8"):
        prepared_text(tmp_path / "a.txt", tmp_path / "out")


@pytest.mark.parametrize("kind", ["a.txt", "a.txt.gz", "b.jsonl"])
@pytest.mark.parametrize(("wrong", "message"), [(b"\xe9", "byte 0xe9"), (b"\0", "zero byte")])
@pytest.mark.parametrize("place", [5, 300_000, 699_999])
def test_invalid_bytes_are_an_error_with_their_offset(tmp_path, kind, wrong, message, place):
    """Also far into a file, beyond the first block."""
    content = bytearray(b"a" * 700_000)
    content[place : place + 1] = wrong
    path = tmp_path / kind
    path.write_bytes(gzip.compress(content) if kind.endswith("gz") else content)
    with pytest.raises(DataError, match=f"{kind} .*{message} at offset {place}[,;].*--encoding"):
        prepared_text(path, tmp_path / "out")


def test_invalid_bytes_can_be_replaced_or_kept(tmp_path):
    content = b"caf\xe9 \0 \xe6\x97\xa5\n"
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    assert prepared_text(path, tmp_path / "replaced", errors="replace") == "caf\ufffd \ufffd 日\n"
    prepare(
        PrepareOptions(str(path), validation=0, read_options=ReadOptions("raw")), tmp_path / "raw"
    )
    assert bytes(Corpus(tmp_path / "raw").split("train")[:-1].tolist()) == content
    with pytest.raises(DataError, match="--encoding raw needs --tokenizer bytes, not bpe"):
        prepare(
            PrepareOptions(str(path), "bpe", 300, read_options=ReadOptions("raw")), tmp_path / "bpe"
        )


def test_a_run_that_stopped_at_an_invalid_byte_resumes_with_replacement(tmp_path, monkeypatch):
    monkeypatch.setattr("tokenformer.data.preparation.SYNC_SECONDS", 0.0)
    path, out = tmp_path / "a.txt", tmp_path / "out"
    path.write_bytes(b"good text\n" * 300_000 + b"\xff\n")
    with pytest.raises(DataError, match="byte 0xff at offset 3000000"):
        prepared_text(path, out)
    kept = json.loads((out / "unfinished.json").read_text())
    assert kept["splits"]["train"]["open_tokens"] > 1_000_000
    assert prepared_text(path, out, errors="replace") == "good text\n" * 300_000 + "\ufffd\n"


def test_in_a_folder_utf16_is_text_and_an_image_is_binary(tmp_path):
    folder, messages = tmp_path / "texts", []
    folder.mkdir()
    (folder / "a.txt").write_bytes(TEXT.encode("utf-16"))
    (folder / "b.png").write_bytes(b"\x89PNG\0\0\0")
    prepare(PrepareOptions(str(folder), validation=0), tmp_path / "out", on_message=messages.append)
    assert bytes(Corpus(tmp_path / "out").split("train")[:-1].tolist()).decode() == TEXT
    assert messages == ["skipped binary files (1): b.png"]


@pytest.mark.parametrize("encoding", ["klingon", "rot13", "base64", ""])
def test_an_unknown_encoding_is_refused(tmp_path, encoding):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"--encoding .* is not known"):
        prepared_text(tmp_path / "a.txt", tmp_path / "out", encoding=encoding)


def test_parquet_that_is_not_utf8_is_a_one_line_error(tmp_path):
    array = pyarrow.array([b"good", b"caf\xe9"]).cast(pyarrow.binary())
    buffers = array.buffers()
    strings = pyarrow.Array.from_buffers(pyarrow.string(), 2, buffers)
    pyarrow.parquet.write_table(pyarrow.table({"text": strings}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet cannot be read: .*0xe9"):
        prepared_text(tmp_path / "a.parquet", tmp_path / "out")


def test_a_line_without_end_is_not_held_in_memory():
    """The line is read no further than the limit, however long it is."""

    class Endless(io.RawIOBase):
        given = 0

        def readable(self) -> bool:
            return True

        def read(self, size: int = -1) -> bytes:
            self.given += size
            return b"a" * size

    endless = Endless()
    stream = as_utf8(endless, "endless", ReadOptions())
    assert len(stream.readline(100_001)) == 100_001
    assert endless.given < 1_000_000
