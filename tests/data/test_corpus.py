"""Prepared corpora: shards as one sequence, and errors for damaged folders."""

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenformer.data.batches import fixed_batches, sample_batch
from tokenformer.data.corpus import Corpus
from tokenformer.data.preparation import PrepareOptions, prepare
from tokenformer.errors import DataError

TEXT = "".join(f"line {number} says {number * 7919 % 1000}\n" for number in range(400)).encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A text in shards of 1000 tokens."""
    place = tmp_path_factory.mktemp("corpus")
    (place / "text.txt").write_bytes(TEXT)
    prepare(
        PrepareOptions(corpus=str(place / "text.txt"), shard_tokens=1000, validation=0.1),
        place / "out",
    )
    return place / "out"


@pytest.fixture
def copy(folder, tmp_path):
    for path in folder.glob("*.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def expected(folder):
    train = Corpus(folder).split("train")
    return np.array([*TEXT[: train.bytes], 256], dtype=np.uint16)


def test_shards_are_one_sequence(folder):
    corpus = Corpus(folder)
    train, held_out = corpus.split("train"), corpus.split("validation")
    assert len(train.shards) > 6
    assert np.array_equal(train[:], expected(folder))
    assert held_out[:].tolist() == [*TEXT[train.bytes :], 256]
    assert TEXT[train.bytes - 1 : train.bytes] == b"\n", "the validation split starts with a line"
    assert (len(train), train.bytes, train.documents) == (len(train[:]), len(train[:]) - 1, 1)
    assert corpus.splits == ["train", "validation"]
    assert corpus.vocab_size == 257
    corpus.verify()


def test_slices_equal_those_of_an_array(folder):
    train, array = Corpus(folder).split("train"), expected(folder)

    @settings(max_examples=300, deadline=None)
    @given(st.integers(-12_000, 12_000), st.integers(-12_000, 12_000))
    def check(start, stop):
        assert np.array_equal(train[start:stop], array[start:stop])

    check()
    assert np.array_equal(train[995:3005], array[995:3005])
    with pytest.raises(ValueError, match="steps of 1"):
        train[::2]


def test_batches_equal_those_of_an_array(folder):
    """Including segments that cross shards."""
    options = {"length": 300, "seed": 1, "first_sample": 0, "count": 64}
    on_disk = sample_batch(Corpus(folder).split("train"), **options)
    assert (on_disk == sample_batch(expected(folder), **options)).all()


def test_a_split_that_is_too_short_is_an_error_with_its_size(folder):
    corpus = Corpus(folder)
    short = len(corpus.split("validation"))
    message = (
        f"split validation of {folder} has {short} tokens; one sequence of length 5000 needs 5001"
    )
    with pytest.raises(DataError, match=re.escape(message)):
        fixed_batches(corpus.split("validation"), batch_size=1, length=5000, count=1)
    with pytest.raises(DataError, match=r"split train of .* has \d+ tokens; .* needs 99001"):
        sample_batch(corpus.split("train"), length=99_000, seed=0, first_sample=0, count=1)
    with pytest.raises(DataError, match="the text has 3 tokens; one sequence of length 5 needs 6"):
        sample_batch(np.arange(3, dtype=np.uint16), length=5, seed=0, first_sample=0, count=1)


def test_a_truncated_shard_is_an_error(copy):
    shard = copy / "train-00002.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"train-00002.bin is damaged: it has 1998 bytes.*2000"):
        Corpus(copy).split("train")
    Corpus(copy).split("validation")


def test_a_missing_shard_is_an_error(copy):
    (copy / "train-00001.bin").unlink()
    with pytest.raises(DataError, match=r"train-00001.bin is missing"):
        Corpus(copy).split("train")


def test_an_altered_shard_is_found_by_its_hash(copy):
    shard = copy / "validation-00000.bin"
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    corpus = Corpus(copy)
    corpus.split("validation")
    with pytest.raises(DataError, match=r"validation-00000.bin has been altered"):
        corpus.verify()


def test_missing_splits_and_unfinished_folders_are_errors(copy, tmp_path_factory):
    with pytest.raises(DataError, match="no split 'test'; it has train, validation"):
        Corpus(copy).split("test")
    (copy / "unfinished.json").write_text("{}")
    (copy / "index.json").unlink()
    with pytest.raises(DataError, match="not finished; run the same `tokenformer prepare` again"):
        Corpus(copy)
    with pytest.raises(DataError, match="holds no prepared corpus"):
        Corpus(tmp_path_factory.mktemp("empty"))


def shard(index):
    return index["splits"]["train"]["shards"][0]


@pytest.mark.parametrize(
    ("alter", "named"),
    [
        (lambda index: index.pop("dtype"), "dtype is None"),
        (lambda index: index.update(dtype="object"), "dtype is 'object'"),
        (lambda index: index.update(dtype=[]), "dtype is"),
        (lambda index: index.update(format="other"), "of the format"),
        (lambda index: index.update(vocab_size=True), "vocab_size is True"),
        (lambda index: index.update(splits=[]), r"splits are \[\]"),
        (lambda index: index.update(splits={}), "splits are {}"),
        (lambda index: index["splits"].update(train=5), "splits.train is 5"),
        (lambda index: index["splits"]["train"].update(bytes=1.5), "train.bytes is 1.5"),
        (lambda index: index["splits"]["train"].update(tokens=1), "train.tokens is 1, its shards"),
        (lambda index: index["splits"]["train"].update(shards={}), "train.shards is {}"),
        (lambda index: shard(index).update(file="../elsewhere.bin"), "file is '../elsewhere.bin'"),
        (lambda index: shard(index).update(file="/dev/zero"), "file is '/dev/zero'"),
        (lambda index: shard(index).update(file=".."), "file is '..'"),
        (lambda index: shard(index).update(file="a\0b"), "file is 'a"),
        (lambda index: shard(index).update(file=None), "file is None"),
        (lambda index: shard(index).update(tokens="many"), "tokens is 'many'"),
        (lambda index: shard(index).update(tokens=-5), "tokens is -5"),
        (lambda index: shard(index).update(sha256="xyz"), "sha256 is 'xyz'"),
        (lambda index: index.update(settings="x" * 1000), "settings are 'x"),
    ],
)
def test_an_invalid_index_is_an_error_that_names_the_field(copy, alter, named):
    index = json.loads((copy / "index.json").read_text())
    alter(index)
    (copy / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=rf"index.json is not .*{named}") as raised:
        Corpus(copy)
    assert len(str(raised.value)) < 300 + len(str(copy))


@pytest.mark.parametrize("text", ["{torn", "", "null", "[" * 100_000, "\udcff"])
def test_a_damaged_index_is_an_error(copy, text):
    (copy / "index.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError, match=r"index.json is not (JSON|of the format)"):
        Corpus(copy)


def test_a_folder_in_place_of_a_shard_is_an_error(copy):
    (copy / "train-00000.bin").unlink()
    (copy / "train-00000.bin").mkdir()
    with pytest.raises(DataError, match=r"train-00000.bin is not a file"):
        Corpus(copy).split("train")
