"""Prepared folders: many shards as one sequence, and refusal of what is not whole."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenformer.data.batches import sample_batch
from tokenformer.data.corpus import Corpus
from tokenformer.data.errors import DataError
from tokenformer.data.preparation import Request, prepare

TEXT = "".join(f"line {number} says {number * 7919 % 1000}\n" for number in range(400)).encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A text in shards of 1000 tokens."""
    place = tmp_path_factory.mktemp("corpus")
    (place / "text.txt").write_bytes(TEXT)
    prepare(
        Request(corpus=str(place / "text.txt"), shard_tokens=1000, validation=0.1), place / "out"
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
    assert TEXT[train.bytes - 1 : train.bytes] == b"\n", "what is held out starts with a line"
    assert (len(train), train.bytes, train.documents) == (len(train[:]), len(train[:]) - 1, 1)
    assert corpus.splits == ["train", "validation"]
    assert corpus.vocab_size == 257
    corpus.verify()


def test_any_slice_is_the_arrays(folder):
    train, array = Corpus(folder).split("train"), expected(folder)

    @settings(max_examples=300, deadline=None)
    @given(st.integers(-12_000, 12_000), st.integers(-12_000, 12_000))
    def check(start, stop):
        assert np.array_equal(train[start:stop], array[start:stop])

    check()
    assert np.array_equal(train[995:3005], array[995:3005])
    with pytest.raises(ValueError, match="steps of 1"):
        train[::2]


def test_batches_are_those_of_the_array(folder):
    """Segments that cross shards included; an array and a split are the same to a batch."""
    options = {"length": 300, "seed": 1, "first_sample": 0, "count": 64}
    on_disk = sample_batch(Corpus(folder).split("train"), **options)
    assert (on_disk == sample_batch(expected(folder), **options)).all()


def test_a_torn_shard_is_named(copy):
    shard = copy / "train-00002.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"train-00002.bin is torn: it has 1998 bytes.*2000"):
        Corpus(copy).split("train")
    Corpus(copy).split("validation")


def test_a_missing_shard_is_named(copy):
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


def test_what_is_no_corpus_says_so(copy, tmp_path_factory):
    with pytest.raises(DataError, match="no split 'test'; it has train, validation"):
        Corpus(copy).split("test")
    (copy / "unfinished.json").write_text("{}")
    (copy / "index.json").unlink()
    with pytest.raises(DataError, match="not finished; run the same `tokenformer prepare` again"):
        Corpus(copy)
    with pytest.raises(DataError, match="holds no prepared corpus"):
        Corpus(tmp_path_factory.mktemp("empty"))


@pytest.mark.parametrize(
    "alter",
    [
        lambda index: index.pop("dtype"),
        lambda index: index.update(dtype="object"),
        lambda index: index.update(format="other"),
        lambda index: index["splits"]["train"]["shards"][0].update(file="../elsewhere.bin"),
        lambda index: index["splits"]["train"]["shards"][0].update(tokens="many"),
        lambda index: index.update(splits=[]),
    ],
)
def test_an_index_that_is_not_ours_is_refused(copy, alter):
    index = json.loads((copy / "index.json").read_text())
    alter(index)
    (copy / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"index.json is not"):
        Corpus(copy)
    (copy / "index.json").write_text("{torn")
    with pytest.raises(DataError, match=r"index.json is not JSON"):
        Corpus(copy)
