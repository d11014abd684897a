"""Texts for perplexity must have the token ids of the model."""

import pytest

from tokenformer.cli import main
from tokenformer.data.byte_tokenizer import VOCAB_SIZE, byte_tokenizer
from tokenformer.data.corpus import open_corpus
from tokenformer.errors import DataError
from tokenformer.evaluate.tokenized_text import load_text


@pytest.fixture
def corpus(tmp_path):
    """A corpus with a BPE of as many ids as the byte tokenizer, in another order."""
    (tmp_path / "text.txt").write_text("some words to measure on\n" * 40)
    out = tmp_path / "corpus"
    options = ["--tokenizer", "bpe", "--vocab_size", str(VOCAB_SIZE), "--validation", "0.5"]
    main(["prepare", str(tmp_path / "text.txt"), "--out", str(out), *options])
    return out


def test_a_corpus_of_another_tokenizer_is_refused(corpus):
    with pytest.raises(DataError, match="corpus has other token ids than the model's tokenizer"):
        load_text(corpus, None, None, byte_tokenizer(), VOCAB_SIZE)
    with pytest.raises(DataError, match="has a vocabulary of 257, the model one of 256"):
        load_text(corpus, None, None, byte_tokenizer(), VOCAB_SIZE - 1)
    assert open_corpus(corpus, None, VOCAB_SIZE).splits  # no tokenizer to compare with


def test_a_tokenizer_with_added_tokens_is_accepted(corpus):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    tokenizer.add_tokens(["<user>"])
    text, split = load_text(corpus, None, None, tokenizer, VOCAB_SIZE + 1)
    assert (split, text.bytes % len("some words to measure on\n")) == ("validation", 0)
