"""Batches of random segments, a pure function of (seed, step): there is no loader state to lose."""

import numpy as np
import torch
from torch import Tensor

from tokenformer.data.token_ids import TokenIds


def random_batch(tokens: TokenIds, *, batch_size: int, length: int, seed: int, step: int) -> Tensor:
    """`batch_size` segments of `length` + 1 tokens [B, length + 1]: inputs and their targets."""
    check_length(tokens, length)
    random = np.random.default_rng([seed, step])
    starts = random.integers(0, len(tokens) - length, size=batch_size)
    return segments(tokens, starts.tolist(), length)


def fixed_batches(tokens: TokenIds, *, batch_size: int, length: int, count: int) -> list[Tensor]:
    """`count` batches spread evenly over `tokens`, always the same: for validation."""
    check_length(tokens, length)
    starts = np.linspace(0, len(tokens) - length - 1, num=batch_size * count).astype(int).tolist()
    return [
        segments(tokens, starts[i : i + batch_size], length)
        for i in range(0, len(starts), batch_size)
    ]


def segments(tokens: TokenIds, starts: list[int], length: int) -> Tensor:
    rows = np.stack([tokens[start : start + length + 1] for start in starts])
    return torch.from_numpy(rows.astype(np.int64))


def check_length(tokens: TokenIds, length: int) -> None:
    if len(tokens) <= length:
        raise ValueError(
            f"the corpus has {len(tokens)} tokens, too few for segments of length={length} + 1"
        )
