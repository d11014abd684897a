"""Pattention of a single row, as in decoding, where reading the tokens is all there is to do.

BLAS multiplies a vector with a matrix on one thread; a batch of such products, of a part of the
tokens each, runs on all of them and reads up to twice as fast.
"""

import torch
from torch import Tensor

from tokenformer.ops.theta import THETAS

MOST_PARTS = 16
LEAST_BYTES = 1 << 20
"""Of the keys; fewer are read as fast by one thread."""


def parts_of(x: Tensor, keys: Tensor, values: Tensor) -> int:
    """In how many equal parts the tokens are taken; 1 where that would not pay."""
    one_row = x.numel() == x.shape[-1] and x.device.type == "cpu"
    large = keys.numel() * keys.itemsize >= LEAST_BYTES
    if not (one_row and large and keys.is_contiguous() and values.is_contiguous()):
        return 1
    return next(count for count in range(MOST_PARTS, 0, -1) if keys.shape[0] % count == 0)


def vector(
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float | Tensor,
    theta: str,
    approximate: str,
    eps: float,
) -> Tensor:
    parts, tokens = parts_of(x, keys, values), keys.shape[0]
    rows = x.reshape(-1, x.shape[-1])  # [R, d_in]
    some_keys = keys.reshape(parts, tokens // parts, keys.shape[1])
    some_values = values.reshape(parts, tokens // parts, values.shape[1])
    scores = torch.bmm(rows.expand(parts, -1, -1), some_keys.transpose(1, 2))  # [parts, R, n/parts]
    scores = scores.transpose(0, 1).reshape(len(rows), tokens)
    weights = THETAS[theta](scores, scale, approximate, eps).to(scores.dtype)
    some_weights = weights.reshape(len(rows), parts, tokens // parts).transpose(0, 1)
    out = torch.bmm(some_weights, some_values).sum(0)  # [R, d_out]
    return out.reshape(*x.shape[:-1], values.shape[1])
