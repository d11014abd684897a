"""A tokenized text to measure perplexity on, from a prepared corpus or a text file."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tokenformer.data.corpus import TokenSequence, open_corpus
from tokenformer.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DECODE_TOKENS = 1 << 20
"""Tokens decoded at once to count words."""


@dataclass(frozen=True)
class TokenizedText:
    """Token ids of a text, with the bytes and words that perplexity is normalized by."""

    tokens: TokenSequence
    bytes: int
    words: int


def load_text(
    path: Path,
    split: str | None,
    limit: int | None,
    tokenizer: "PreTrainedTokenizerBase",
    vocab_size: int,
) -> tuple[TokenizedText, str | None]:
    """Return the first `limit` tokens of a prepared split or of a text file, and the split."""
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
    return TokenizedText(tokens, size, count_words(tokens, tokenizer)), split


def read_file(path: Path, limit: int | None, tokenizer: "PreTrainedTokenizerBase") -> TokenizedText:
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
    return TokenizedText(np.array(ids), len(text.encode()), len(text.split()))


def count_words(tokens: TokenSequence, tokenizer: "PreTrainedTokenizerBase") -> int:
    """Count white-space-separated words, decoding a part of the text at a time."""
    words, inside = 0, False
    for start in range(0, len(tokens), DECODE_TOKENS):
        ids = tokens[start : start + DECODE_TOKENS].tolist()
        text = tokenizer.decode(ids, skip_special_tokens=True)
        if text:
            words += len(text.split()) - (inside and not text[0].isspace())
            inside = not text[-1].isspace()
    return words
