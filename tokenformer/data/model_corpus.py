"""A prepared corpus for a model that is there already: its ids must be those of the model."""

from pathlib import Path
from typing import Any

from tokenformer.data.corpus import Corpus
from tokenformer.data.tokenizer import tokenizer_of_file
from tokenformer.errors import DataError


def open_corpus(path: Path, tokenizer: Any, vocab_size: int) -> Corpus:
    """A prepared corpus whose ids are those of the model; without a tokenizer, its size is all that
    can be told of them."""
    corpus = Corpus(path)
    if corpus.vocab_size > vocab_size:
        raise DataError(
            f"{path} has a vocabulary of {corpus.vocab_size}, the model one of {vocab_size}; "
            "prepare the text with the model's tokenizer"
        )
    if tokenizer is not None:
        theirs = tokenizer_of_file(corpus.tokenizer / "tokenizer.json").get_vocab()
        if not theirs.items() <= tokenizer.get_vocab().items():
            raise DataError(
                f"{path} has other ids than the model's tokenizer; prepare the text with that"
            )
    return corpus
