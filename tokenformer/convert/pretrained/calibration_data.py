"""Calibration data: text to fit and measure a conversion on, from a prepared corpus or a file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenformer.data.batches import fixed_batches
from tokenformer.data.corpus import TokenSequence, open_corpus
from tokenformer.errors import ConversionError, DataError

MAX_LENGTH = 512
SEQUENCES, HELD_OUT_SEQUENCES = 64, 16
BATCH_SIZE = 8
HELD_OUT_SHARE = 0.1
"""Share of a text file that is held out, at its end."""


@dataclass(frozen=True)
class CalibrationData:
    """Token ids to fit or train on, and held-out token ids to measure on."""

    tokens: TokenSequence
    held_out: TokenSequence
    length: int
    """Tokens of a sequence."""

    def batches(self) -> list[Tensor]:
        return spread(self.tokens, self.length, SEQUENCES)

    def held_out_batches(self) -> list[Tensor]:
        return spread(self.held_out, self.length, HELD_OUT_SEQUENCES)


def spread(tokens: TokenSequence, length: int, sequences: int) -> list[Tensor]:
    """Return evenly spaced sequences of the text: token ids [B, length + 1]."""
    found = fixed_batches(tokens, batch_size=1, length=length, count=sequences)
    return list(torch.cat(found).split(BATCH_SIZE))


def read_calibration_data(option: str, path: Path, tokenizer: Any, config: Any) -> CalibrationData:
    """Read the train and validation splits of a prepared corpus, or split a text file."""
    try:
        tokens, held_out = (
            from_corpus(path, tokenizer, config) if path.is_dir() else from_file(path, tokenizer)
        )
    except DataError as error:
        raise ConversionError(f"{option} {path}: {error}") from None
    length = min(MAX_LENGTH, config.max_position_embeddings)
    for part in (tokens, held_out):
        if len(part) <= length:
            raise ConversionError(
                f"{option} {path} is too short: {len(tokens)} tokens and {len(held_out)} held out; "
                f"more than {length} of each are needed"
            )
    return CalibrationData(tokens, held_out, length)


def from_corpus(path: Path, tokenizer: Any, config: Any) -> tuple[TokenSequence, TokenSequence]:
    corpus = open_corpus(path, tokenizer, config.vocab_size)
    return corpus.split("train"), corpus.split("validation")


def from_file(path: Path, tokenizer: Any) -> tuple[TokenSequence, TokenSequence]:
    if tokenizer is None:
        raise DataError("a text file needs a tokenizer and the source has none; give --tokenizer")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise DataError("it is not UTF-8 text") from None
    except OSError as error:
        raise DataError(f"it cannot be read: {error.strerror}") from None
    ids = np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    kept = round(len(ids) * (1 - HELD_OUT_SHARE))
    return ids[:kept], ids[kept:]
