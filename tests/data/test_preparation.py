"""Preparing every kind of corpus, checked against ids computed from the documents."""

import bz2
import gzip
import json
import lzma
import random

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from tests.support.corpora import COMPRESSORS, zipped
from tokenformer.data.corpus import Corpus
from tokenformer.data.preparation import PrepareOptions, prepare
from tokenformer.data.splits import STANDARD_SIZE
from tokenformer.errors import DataError

END = 256
DOCUMENTS = [
    f"document {number}: déjà vu 日本語 👩‍👩‍👧\n" * (number % 5 + 1) for number in range(200)
]


def tokens(*documents: str) -> list[int]:
    return [token for text in documents for token in (*text.encode(), END)]


def jsonl(documents, field="text") -> bytes:
    return "".join(json.dumps({"id": 1, field: text}) + "\n" for text in documents).encode()


@pytest.fixture
def make(tmp_path):
    """make(corpus, **options) prepares a corpus in a new folder."""
    count = iter(range(100))

    def run(corpus, workers=1, **options):
        out = tmp_path / f"out-{next(count)}"
        prepare(PrepareOptions(corpus=str(corpus), **options), out, workers=workers)
        Corpus(out).verify()
        return Corpus(out)

    return run


def all_documents(corpus: Corpus) -> dict[str, list[str]]:
    """The documents of every split, decoded from bytes."""
    found = {}
    for name in corpus.splits:
        ids = corpus.split(name)[:]
        rows = np.split(ids, np.flatnonzero(ids == END) + 1)[:-1]
        found[name] = [row[:-1].astype(np.uint8).tobytes().decode() for row in rows]
        assert len(found[name]) == corpus.split(name).documents
        assert sum(len(text.encode()) for text in found[name]) == corpus.split(name).bytes
    return found


@pytest.mark.parametrize("suffix", ["", *COMPRESSORS, ".zip"])
def test_a_text_in_every_compression(make, tmp_path, suffix):
    text = "".join(DOCUMENTS).encode()
    packed = {**COMPRESSORS, "": bytes, ".zip": lambda t: zipped(**{"a.txt": t})}[suffix](text)
    (tmp_path / f"a.txt{suffix}").write_bytes(packed)
    corpus = make(tmp_path / f"a.txt{suffix}")
    train, held_out = corpus.split("train"), corpus.split("validation")
    assert train[:].tolist() == [*text[: train.bytes], END]
    assert held_out[:].tolist() == [*text[train.bytes :], END]
    assert abs(held_out.bytes - 0.05 * len(text)) < 200


@pytest.mark.parametrize("suffix", ["", *COMPRESSORS, ".zip"])
def test_rows_in_every_compression_are_split_alike(make, tmp_path, suffix):
    content = jsonl(DOCUMENTS)
    packed = {**COMPRESSORS, "": bytes, ".zip": lambda t: zipped(**{"b.jsonl": t})}[suffix](content)
    (tmp_path / f"b.jsonl{suffix}").write_bytes(packed)
    found = all_documents(make(tmp_path / f"b.jsonl{suffix}", validation=0.1))
    assert sorted(found["train"] + found["validation"]) == sorted(DOCUMENTS)
    assert 5 < len(found["validation"]) < 40
    shuffled = random.Random(0).sample(DOCUMENTS, len(DOCUMENTS))
    table = pyarrow.table({"id": list(range(200)), "body": shuffled})
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet", row_group_size=33)
    other = all_documents(make(tmp_path / "c.parquet", validation=0.1, text_field="body"))
    assert sorted(other["validation"]) == sorted(found["validation"]), "order does not matter"
    assert other["train"] == [text for text in shuffled if text in set(found["train"])]


def test_the_files_of_a_folder_are_read_in_order(make, tmp_path):
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / "a.txt").write_text("one")
    (folder / "b" / "rows.jsonl").write_bytes(jsonl(["two", "", "three"]))
    (folder / "b" / "some.zip").write_bytes(
        zipped(**{"y.md": b"five", "x.md.gz": gzip.compress(b"four")})
    )
    (folder / "c").write_text("six")
    (folder / ".hidden").write_text("no")
    (folder / "photo.png").write_bytes(b"\x89PNG\0\0\0")
    corpus = make(folder, validation=0)
    assert corpus.split("train")[:].tolist() == tokens("one", "two", "three", "four", "five", "six")
    assert corpus.splits == ["train"]


def test_files_named_after_splits_keep_their_split(make, tmp_path):
    folder = tmp_path / "pile"
    (folder / "train").mkdir(parents=True)
    (folder / "train" / "00.jsonl.zst").write_bytes(zstandard.compress(jsonl(["a", "b"])))
    (folder / "val.jsonl").write_bytes(jsonl(["c"]))
    (folder / "test.txt").write_text("d")
    corpus = make(folder)
    found = {name: corpus.split(name)[:].tolist() for name in corpus.splits}
    assert found == {"train": tokens("a", "b"), "validation": tokens("c"), "test": tokens("d")}
    with pytest.raises(DataError, match="has a validation split of its own"):
        make(folder, validation=0.5)


def test_validation_is_held_out_of_train_if_there_is_only_test(make, tmp_path):
    """Rows are split by document, a single text by position; the test split is kept."""
    rows, text = tmp_path / "rows", tmp_path / "text"
    rows.mkdir()
    (rows / "train.jsonl").write_bytes(jsonl(DOCUMENTS))
    (rows / "test.jsonl").write_bytes(jsonl(["d"]))
    found = all_documents(make(rows))
    assert sorted(found["train"] + found["validation"]) == sorted(DOCUMENTS)
    assert found["test"] == ["d"]
    assert found["validation"]
    text.mkdir()
    book = "".join(f"line {number}\n" for number in range(1000))
    (text / "test.txt").write_text("d")
    (text / "train.txt").write_text(book)
    found = all_documents(make(text))
    assert found["train"][0] + found["validation"][0] == book
    assert len(found["validation"][0]) == pytest.approx(0.05 * len(book), abs=20)
    assert found["test"] == ["d"]
    assert make(text, validation=0).splits == ["train", "test"]


@pytest.mark.parametrize("seed", range(5))
def test_a_few_documents_are_never_all_in_one_split(make, tmp_path, seed):
    (tmp_path / "few.jsonl").write_bytes(jsonl(DOCUMENTS[:3]))
    found = all_documents(make(tmp_path / "few.jsonl", seed=seed))
    assert len(found["train"]) == 2
    assert len(found["validation"]) == 1
    (tmp_path / "one.jsonl").write_bytes(jsonl(DOCUMENTS[:1]))
    assert all_documents(make(tmp_path / "one.jsonl", seed=seed)) == {"train": DOCUMENTS[:1]}


def test_the_limit_of_documents_holds_after_an_interruption(make, tmp_path, monkeypatch):
    (tmp_path / "all.jsonl").write_bytes(jsonl(DOCUMENTS))
    (tmp_path / "few.jsonl").write_bytes(jsonl(DOCUMENTS[:50]))
    few = make(tmp_path / "few.jsonl")
    assert few.index["splits"] == make(tmp_path / "all.jsonl", documents=50).index["splits"]
    assert make(tmp_path / "few.jsonl", documents=51).index["splits"] == few.index["splits"]

    monkeypatch.setattr("tokenformer.data.corpus_reader.CHUNK_BYTES", 300)
    monkeypatch.setattr("tokenformer.data.preparation.SYNC_SECONDS", 0.0)
    request, out = (
        PrepareOptions(str(tmp_path / "all.jsonl"), documents=50),
        tmp_path / "interrupted",
    )
    calls = iter(range(100))

    def interrupt(progress):
        if next(calls) in (3, 7):
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            prepare(request, out, on_progress=interrupt)
    prepare(request, out, on_progress=interrupt)
    assert Corpus(out).index["splits"] == few.index["splits"]


def test_the_fraction_held_out_is_as_requested(make, tmp_path):
    documents = [f"text number {number}" for number in range(20_000)]
    (tmp_path / "many.jsonl").write_bytes(jsonl(documents))
    for seed in (0, 1):
        held_out = make(tmp_path / "many.jsonl", seed=seed).split("validation").documents
        assert abs(held_out - 1000) < 120  # four standard deviations


def test_a_text_of_100_million_bytes_has_the_standard_split(make, tmp_path):
    """Like enwik8 and text8; the name does not matter."""
    block = bytes(random.Random(0).choices(b"abcdefgh \n", k=1_000_000))
    with gzip.open(tmp_path / "renamed.gz", "wb", compresslevel=1) as file:
        for _ in range(100):
            file.write(block)
    corpus = make(tmp_path / "renamed.gz")
    sizes = {name: corpus.split(name).bytes for name in corpus.splits}
    assert sizes == {"train": 90_000_000, "validation": 5_000_000, "test": 5_000_000}
    assert sum(sizes.values()) == STANDARD_SIZE
    assert corpus.split("validation")[1_000_000:2_000_000].tobytes() == (
        np.frombuffer(block, dtype=np.uint8).astype("<u2").tobytes()
    )


@pytest.mark.slow
def test_enwik8(make, real_data):
    import hashlib

    corpus = make(real_data("text/enwik8.gz"))
    digest = hashlib.sha256()
    for name in ("train", "validation", "test"):
        digest.update(corpus.split(name)[:-1].astype(np.uint8).tobytes())
    assert digest.hexdigest().startswith("2b49720ec4d78c3c9fabaee6e4179a5e")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cut.txt.gz", gzip.compress(b"text" * 9999)[:-20], "cut.txt.gz cannot be read"),
        ("cut.txt.bz2", bz2.compress(b"text" * 9999)[:-20], "cannot be read"),
        ("cut.txt.xz", lzma.compress(b"text" * 9999)[:-20], "cannot be read"),
        ("cut.txt.zst", zstandard.compress(b"text" * 9999)[:-5], "cannot be read"),
        ("cut.zip", zipped(a=b"text" * 9999)[:-30], "cannot be read"),
        ("bad.txt.gz", b"plain", "bad.txt.gz cannot be read"),
        ("bad.jsonl", b'{"text": "a"}\n{"text": \n', "bad.jsonl, line 2 is not JSON"),
        (
            "bad.jsonl",
            b'{"body": "a"}\n',
            "line 1 has no field 'text'; its fields are 'body'; .* --text_field",
        ),
        ("bad.jsonl", b"[1]\n", "line 1 has no field 'text'"),
        ("bad.jsonl", b'{"text": 5}\n', "the field 'text' holds int, not text"),
        ("bad.parquet", b"PAR1 not", "bad.parquet is not parquet"),
        ("a.tar.gz", b"", "a.tar.gz is a tar archive"),
        ("a.parquet.gz", b"", "compressed inside"),
        ("empty.txt", b"", "holds no text"),
        ("empty.zip", zipped(), "holds no text, jsonl or parquet file"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_damaged_or_unsupported_file_is_a_one_line_error(make, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as raised:
        make(tmp_path / name)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.glob("out-*")), "nothing is left for the next attempt"


def test_a_damaged_archive_member_is_found_by_its_checksum(make, tmp_path):
    content = bytearray(zipped(**{"a.txt": random.Random(0).randbytes(5000)}))
    content[2000] ^= 1
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(DataError, match="cannot be read"):
        make(tmp_path / "a.zip")


def test_names_of_archive_members_are_not_used_as_paths(make, tmp_path):
    (tmp_path / "evil.zip").write_bytes(zipped(**{"../../outside.txt": b"text", "/etc/x": b"more"}))
    found = all_documents(make(tmp_path / "evil.zip", validation=0))
    assert sorted(found["train"]) == ["more", "text"]
    assert not (tmp_path.parent.parent / "outside.txt").exists()
