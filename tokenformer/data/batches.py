"""Batches of training and validation segments as tensors; `order` decides where segments start."""

import numpy as np
import torch
from torch import Tensor

from tokenformer.data.corpus import Split, TokenSequence
from tokenformer.data.order import Starts, check_length, segment_starts, validation_starts


def sample_batch(
    tokens: TokenSequence,
    *,
    length: int,
    seed: int,
    first_sample: int,
    count: int,
    mode: str = "random",
) -> Tensor:
    """Return samples first_sample .. first_sample + count - 1: inputs and targets
    [count, length + 1].

    A rank that needs a slice of the global batch requests only that range of samples.
    """
    check_length(len(tokens), length, describe(tokens))
    starts = segment_starts(
        len(tokens), length, seed=seed, first_sample=first_sample, count=count, mode=mode
    )
    return segments(tokens, starts, length)


def fixed_batches(
    tokens: TokenSequence, *, batch_size: int, length: int, count: int
) -> list[Tensor]:
    """Return at most `count` batches spread evenly over `tokens`, the same on every call: for
    validation."""
    check_length(len(tokens), length, describe(tokens))
    starts = validation_starts(len(tokens), length, count=batch_size * count)
    return [
        segments(tokens, starts[i : i + batch_size], length)
        for i in range(0, len(starts), batch_size)
    ]


def describe(tokens: TokenSequence) -> str:
    """The name of a token sequence in error messages."""
    return str(tokens) if isinstance(tokens, Split) else "the text"


def segments(tokens: TokenSequence, starts: Starts, length: int) -> Tensor:
    rows = np.empty((len(starts), length + 1), dtype=np.int64)
    for row, start in zip(rows, starts.tolist(), strict=True):
        row[:] = tokens[start : start + length + 1]
    return torch.from_numpy(rows)  # [B, length + 1]
