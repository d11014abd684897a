"""A text to measure perplexity on, read from prepared shards or from a file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokenformer.data.model_corpus import open_corpus
from tokenformer.data.token_ids import TokenSequence
from tokenformer.errors import DataError

DECODED_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Text:
    """A text as ids, and what its perplexity is counted in."""

    tokens: TokenSequence
    bytes: int
    words: int


def read_text(
    path: Path, split: str | None, limit: int | None, tokenizer: Any, vocab_size: int
) -> tuple[Text, str | None]:
    """The first `limit` ids of a prepared split or of a text file, and the split's name."""
    if not path.is_dir():
        if split is not None:
            raise DataError(f"--split {split} is for a prepared corpus; {path} is a file")
        return read_file(path, limit, tokenizer), None
    corpus = open_corpus(path, tokenizer, vocab_size)
    split = split or ("test" if "test" in corpus.splits else "validation")
    whole = corpus.split(split)
    tokens = whole[: min(limit or len(whole), len(whole))]
    size = whole.bytes
    if len(tokens) < len(whole):
        size = len(tokenizer.decode(tokens.tolist(), skip_special_tokens=True).encode())
    return Text(tokens, size, count_words(tokens, tokenizer)), split


def read_file(path: Path, limit: int | None, tokenizer: Any) -> Text:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if not ids:
        raise DataError(f"{path} is empty")
    if limit is not None and limit < len(ids):
        ids = ids[:limit]
        text = tokenizer.decode(ids)
    return Text(np.array(ids), len(text.encode()), len(text.split()))


def count_words(tokens: TokenSequence, tokenizer: Any) -> int:
    """Words between white space, of text that is decoded a part at a time."""
    words, inside = 0, False
    for place in range(0, len(tokens), DECODED_AT_ONCE):
        ids = tokens[place : place + DECODED_AT_ONCE].tolist()
        text = tokenizer.decode(ids, skip_special_tokens=True)
        if text:
            words += len(text.split()) - (inside and not text[0].isspace())
            inside = not text[-1].isspace()
    return words
