"""Corpora encoded with a tokenizer: the same ids for any number of blocks and processes."""

import json

import pytest
from transformers import AutoTokenizer

from tokenformer.data.byte_tokenizer import byte_tokenizer
from tokenformer.data.corpus import Corpus
from tokenformer.data.preparation import PrepareOptions, prepare
from tokenformer.data.standard_library import source_files
from tokenformer.data.tokenizer import load_tokenizer
from tokenformer.errors import DataError

WORDS = [
    f"Documents come and go; number {n} stays, naïve as 日本語 and 👩‍👩‍👧.\n" for n in range(300)
]


@pytest.fixture(scope="module")
def python_sources() -> bytes:
    """A megabyte of real text with runs of spaces and blank lines, which tokenizers merge."""
    import sysconfig
    from pathlib import Path

    text = b""
    for path in source_files(Path(sysconfig.get_path("stdlib"))):
        text += path.read_bytes()
        if len(text) > 1 << 20:
            return text
    raise AssertionError("the standard library is larger than that")


def run(corpus, out, workers=1, **options) -> Corpus:
    prepare(PrepareOptions(corpus=str(corpus), **options), out, workers=workers)
    return Corpus(out)


def test_blocks_and_processes_give_the_ids_of_the_whole_text(tmp_path, real_data, python_sources):
    file = real_data("tokenizer/20B_tokenizer.json")
    (tmp_path / "long.py").write_bytes(python_sources)
    one, two = (
        run(
            tmp_path / "long.py", tmp_path / f"out{w}", workers=w, tokenizer=str(file), validation=0
        )
        for w in (1, 2)
    )
    tokenizer = AutoTokenizer.from_pretrained(two.tokenizer)
    assert tokenizer("Hello world").input_ids == [12092, 1533]
    assert tokenizer.eos_token_id == 0
    whole = tokenizer(python_sources.decode(errors="replace")).input_ids
    assert two.split("train")[:].tolist() == [*whole, 0]
    assert one.index == two.index
    assert two.index["vocab_size"] == 50277
    assert two.index["dtype"] == "uint16"
    assert two.index["tokenizer"]["name"] == "20B_tokenizer.json"


def test_a_bpe_trained_on_the_corpus(tmp_path):
    rows = "".join(json.dumps({"text": text}) + "\n" for text in WORDS)
    (tmp_path / "rows.jsonl").write_text(rows)
    options = {"tokenizer": "bpe", "vocab_size": 400}
    corpus, again = (
        run(tmp_path / "rows.jsonl", tmp_path / f"out{n}", **options) for n in range(2)
    )
    assert corpus.index == again.index, "the training is deterministic"
    tokenizer = AutoTokenizer.from_pretrained(corpus.tokenizer)
    assert len(tokenizer) == corpus.vocab_size == 400
    train = corpus.split("train")
    assert len(train) < train.bytes / 3
    decoded = tokenizer.decode(train[:].tolist()) + tokenizer.decode(
        corpus.split("validation")[:].tolist()
    )
    assert sorted(decoded.split("<|endoftext|>")[:-1]) == sorted(WORDS)


def test_text_that_spells_a_special_token_is_ordinary_text(tmp_path):
    (tmp_path / "a.txt").write_text("before <|endoftext|> after")
    corpus = run(
        tmp_path / "a.txt", tmp_path / "out", tokenizer="bpe", vocab_size=300, validation=0
    )
    end = corpus.index["tokenizer"]["end_of_text"]
    ids = corpus.split("train")[:].tolist()
    assert ids.count(end) == 1
    assert ids[-1] == end


def test_a_tokenizer_folder_and_a_large_vocabulary(tmp_path):
    """Ids beyond 65,535 take four bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{n}": n for n in range(70_000)} | {"<stop>": 70_000}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "words")
    (tmp_path / "a.txt").write_text("w5 w69999 w7")
    options = {"tokenizer": str(tmp_path / "words"), "validation": 0}
    with pytest.raises(DataError, match=r"does not say which token ends a text; .* --end_of_text"):
        run(tmp_path / "a.txt", tmp_path / "out", **options)
    with pytest.raises(DataError, match="--end_of_text nope is not a token of"):
        run(tmp_path / "a.txt", tmp_path / "out", end_of_text="nope", **options)
    corpus = run(tmp_path / "a.txt", tmp_path / "out", end_of_text="<stop>", **options)
    assert corpus.split("train")[:].tolist() == [5, 69_999, 7, 70_000]
    assert corpus.index["dtype"] == "uint32"
    assert AutoTokenizer.from_pretrained(corpus.tokenizer).eos_token == "<stop>"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": "bpe"}, "needs a size, for example --vocab_size 4096"),
        ({"tokenizer": "bpe", "vocab_size": 100}, "--vocab_size 100 must be at least 257"),
        ({"vocab_size": 4096}, "add --tokenizer bpe"),
        ({"tokenizer": "a.txt"}, "is not a tokenizer.json"),
        ({"tokenizer": "no/such/thing"}, r"--tokenizer: no no/such/thing \(pass bytes, bpe"),
    ],
)
def test_invalid_tokenizers_are_one_line_errors(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=message) as raised:
        run("a.txt", tmp_path / "out", **options)
    assert "\n" not in str(raised.value)


def test_the_byte_tokenizer_is_saved_as_transformers_saves_it(tmp_path):
    """`prepare` writes the folder without importing transformers."""
    byte_tokenizer().save_pretrained(tmp_path / "theirs")
    load_tokenizer("bytes", None).save(tmp_path / "ours")
    theirs, ours = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("theirs", "ours"))
    assert type(ours) is type(theirs)
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.padding_side == theirs.padding_side
    assert ours.model_max_length == theirs.model_max_length
    assert ours.get_vocab() == theirs.get_vocab()
    text = "naïve  \t\n日本語 <|endoftext|>"
    assert ours(text).input_ids == theirs(text).input_ids
    assert ours.decode(ours(text).input_ids) == text
