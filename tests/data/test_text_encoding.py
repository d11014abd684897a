"""Encodings and limits: no text is altered without a word, and no file fills the disk."""

import bz2
import codecs
import gzip
import io
import json
import lzma
import zipfile

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from tokenformer.data.corpus import Corpus
from tokenformer.data.preparation import PrepareOptions, prepare
from tokenformer.data.text_encoding import ReadOptions, as_utf8
from tokenformer.errors import DataError

TEXT = "naïve café 日本語 🙂\n" * 50
PACKINGS = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.compress,
}


def text_of(corpus, out, tokenizer="bytes", **reading) -> str:
    """What a corpus of one text is prepared to, in UTF-8."""
    request = PrepareOptions(
        str(corpus), tokenizer, validation=0, read_options=ReadOptions(**reading)
    )
    prepare(request, out)
    return bytes(Corpus(out).split("train")[:-1].tolist()).decode()


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
@pytest.mark.parametrize("packing", ["", ".gz"])
def test_a_byte_order_mark_says_the_encoding(tmp_path, encoding, mark, packing):
    content = mark + TEXT.encode(encoding)
    path = tmp_path / f"a.txt{packing}"
    path.write_bytes(gzip.compress(content) if packing else content)
    assert text_of(path, tmp_path / "out") == TEXT


def test_a_division_by_place_is_of_the_text_and_not_of_the_file(tmp_path):
    for name, content in (("8", TEXT.encode()), ("16", TEXT.encode("utf-16"))):
        (tmp_path / f"{name}.txt").write_bytes(content)
        prepare(PrepareOptions(str(tmp_path / f"{name}.txt"), validation=0.2), tmp_path / name)
    assert Corpus(tmp_path / "8").index["splits"] == Corpus(tmp_path / "16").index["splits"]


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16-le", "shift_jis"])
def test_text_in_a_named_encoding(tmp_path, encoding):
    text = "日本\n" * 20 if encoding == "shift_jis" else "naïve café\n" * 20
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    with pytest.raises(DataError, match=r"a.txt (is not utf-8: byte 0x|has a zero byte at offset)"):
        text_of(tmp_path / "a.txt", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert text_of(tmp_path / "a.txt", tmp_path / "out", encoding=encoding) == text
    with pytest.raises(DataError, match=f"was made with --encoding {encoding}, not utf-8"):
        text_of(tmp_path / "a.txt", tmp_path / "out")


@pytest.mark.parametrize("kind", ["a.txt", "a.txt.gz", "b.jsonl"])
@pytest.mark.parametrize(("wrong", "told"), [(b"\xe9", "byte 0xe9"), (b"\0", "zero byte")])
@pytest.mark.parametrize("place", [5, 300_000, 699_999])
def test_what_is_not_text_is_named_with_its_offset(tmp_path, kind, wrong, told, place):
    """Also far into a file, across the blocks in which it is read."""
    content = bytearray(b"a" * 700_000)
    content[place : place + 1] = wrong
    path = tmp_path / kind
    path.write_bytes(gzip.compress(content) if kind.endswith("gz") else content)
    with pytest.raises(DataError, match=f"{kind} .*{told} at offset {place}[,;].*--encoding"):
        text_of(path, tmp_path / "out")


def test_what_is_not_text_can_be_replaced_or_kept(tmp_path):
    content = b"caf\xe9 \0 \xe6\x97\xa5\n"
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    assert text_of(path, tmp_path / "replaced", errors="replace") == "caf\ufffd \ufffd 日\n"
    prepare(
        PrepareOptions(str(path), validation=0, read_options=ReadOptions("raw")), tmp_path / "raw"
    )
    assert bytes(Corpus(tmp_path / "raw").split("train")[:-1].tolist()) == content
    with pytest.raises(DataError, match="--encoding raw needs --tokenizer bytes, not bpe"):
        prepare(
            PrepareOptions(str(path), "bpe", 300, read_options=ReadOptions("raw")), tmp_path / "bpe"
        )


def test_a_run_that_met_a_wrong_byte_continues_with_replacement(tmp_path, monkeypatch):
    monkeypatch.setattr("tokenformer.data.preparation.SYNC_SECONDS", 0.0)
    path, out = tmp_path / "a.txt", tmp_path / "out"
    path.write_bytes(b"good text\n" * 300_000 + b"\xff\n")
    with pytest.raises(DataError, match="byte 0xff at offset 3000000"):
        text_of(path, out)
    kept = json.loads((out / "unfinished.json").read_text())
    assert kept["splits"]["train"]["open_tokens"] > 1_000_000
    assert text_of(path, out, errors="replace") == "good text\n" * 300_000 + "\ufffd\n"


def test_in_a_folder_utf16_is_text_and_a_picture_is_not(tmp_path):
    folder, messages = tmp_path / "texts", []
    folder.mkdir()
    (folder / "a.txt").write_bytes(TEXT.encode("utf-16"))
    (folder / "b.png").write_bytes(b"\x89PNG\0\0\0")
    prepare(PrepareOptions(str(folder), validation=0), tmp_path / "out", on_message=messages.append)
    assert bytes(Corpus(tmp_path / "out").split("train")[:-1].tolist()).decode() == TEXT
    assert messages == ["skipped 1 binary files: b.png"]


@pytest.mark.parametrize("encoding", ["klingon", "rot13", "base64", ""])
def test_an_unknown_encoding_is_refused(tmp_path, encoding):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"--encoding .* is not known"):
        text_of(tmp_path / "a.txt", tmp_path / "out", encoding=encoding)


def test_parquet_that_is_not_utf8_is_one_clear_line(tmp_path):
    array = pyarrow.array([b"good", b"caf\xe9"]).cast(pyarrow.binary())
    buffers = array.buffers()
    strings = pyarrow.Array.from_buffers(pyarrow.string(), 2, buffers)
    pyarrow.parquet.write_table(pyarrow.table({"text": strings}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet cannot be read: .*0xe9"):
        text_of(tmp_path / "a.parquet", tmp_path / "out")


def bomb(kind: str) -> bytes:
    """17.6 MB of the same line, more than 500 times what it takes packed."""
    content = b"aaaaaaaaaaaaaaa\n" * 1_100_000
    if kind == "zip":
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.txt", content)
        return buffer.getvalue()
    packed = PACKINGS[kind](content)
    return gzip.compress(packed) if kind == "xz" else packed


@pytest.mark.parametrize("kind", [*PACKINGS, "zip"])
def test_a_decompression_bomb_is_refused_unless_allowed(tmp_path, kind):
    name = {"zip": "a.zip", "xz": "a.txt.xz.gz"}.get(kind, f"a.txt.{kind}")
    (tmp_path / name).write_bytes(bomb(kind))
    with pytest.raises(DataError, match=r"unpacks to more than 100 times .*--max_ratio 1000, or"):
        text_of(tmp_path / name, tmp_path / "out")
    assert not (tmp_path / "out").exists(), "nothing is written before it is noticed"
    prepare(
        PrepareOptions(str(tmp_path / name), read_options=ReadOptions(max_ratio=0)),
        tmp_path / "out",
    )
    assert Corpus(tmp_path / "out").split("train").bytes > 16_000_000


def test_a_bomb_among_rows_is_refused(tmp_path):
    rows = json.dumps({"text": "a" * 100_000}).encode() + b"\n"
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(rows * 250))
    table = pyarrow.table({"text": ["a" * 100_000] * 250})
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    for name in ("a.jsonl.gz", "b.parquet"):
        with pytest.raises(DataError, match=f"{name} unpacks to more than 100 times"):
            text_of(tmp_path / name, tmp_path / f"out-{name}")


def test_a_row_repeated_by_a_dictionary_is_refused_before_it_fills_the_memory(tmp_path):
    """128 rows of 8 MB, 1 GB in all, in a file of less than 1 kB."""
    numbers = pyarrow.array([0] * 128, pyarrow.int32())
    repeated = pyarrow.DictionaryArray.from_arrays(numbers, pyarrow.array(["a" * 8_000_000]))
    path = tmp_path / "a.parquet"
    options = {"compression": "zstd", "store_schema": False}
    pyarrow.parquet.write_table(pyarrow.table({"text": repeated}), path, **options)
    assert path.stat().st_size < 2000
    usual = pyarrow.default_memory_pool()
    counted = pyarrow.proxy_memory_pool(usual)
    pyarrow.set_memory_pool(counted)
    try:
        with pytest.raises(DataError, match=r"a.parquet unpacks to more than 100 times"):
            text_of(path, tmp_path / "out")
    finally:
        pyarrow.set_memory_pool(usual)
    assert 8_000_000 < counted.max_memory() < 200_000_000


def test_an_archive_whose_members_overlap_is_refused(tmp_path):
    """As a zip bomb without nesting: one block of data, many names."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.txt", TEXT)
        entry = archive.infolist()[0]
        for number in range(5):
            twin = zipfile.ZipInfo(f"{number}.txt")
            for field in ("header_offset", "CRC", "compress_size", "file_size"):
                setattr(twin, field, getattr(entry, field))
            archive.filelist.append(twin)
    (tmp_path / "a.zip").write_bytes(buffer.getvalue())
    with pytest.raises(DataError, match="members that overlap"):
        text_of(tmp_path / "a.zip", tmp_path / "out")


def test_a_row_that_is_too_long_is_refused_by_its_number(tmp_path):
    rows = [json.dumps({"text": text}) + "\n" for text in ("short", "long" * 100)]
    (tmp_path / "a.jsonl").write_text("".join(rows))
    table = pyarrow.table({"text": ["short", "long" * 100]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    for name, place in (("a.jsonl", "line 2"), ("a.parquet", "row 1")):
        with pytest.raises(DataError, match=f"{name}, {place} is longer than 200 bytes"):
            text_of(tmp_path / name, tmp_path / f"short-{name}", max_row_bytes=200)
        prepare(PrepareOptions(str(tmp_path / name)), tmp_path / f"{name}-out")


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
