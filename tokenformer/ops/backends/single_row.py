"""Pattention of a single row, as in decoding, which is memory-bound.

BLAS multiplies a vector with a matrix on one thread. Splitting the tokens into a batch of such
products uses all threads and reads up to twice as fast.
"""

import torch
from torch import Tensor

from tokenformer.ops.theta import ThetaOptions

MOST_PARTS = 16
LEAST_BYTES = 1 << 20
"""Size of the keys; fewer bytes are read as fast by one thread."""


def parts_of(x: Tensor, keys: Tensor, values: Tensor) -> int:
    """Return the number of equal parts to split the tokens into; 1 if splitting is not faster."""
    one_row = x.numel() == x.shape[-1] and x.device.type == "cpu"
    large = keys.numel() * keys.itemsize >= LEAST_BYTES
    if not (one_row and large and keys.is_contiguous() and values.is_contiguous()):
        return 1
    return next(count for count in range(MOST_PARTS, 0, -1) if keys.shape[0] % count == 0)


def run_single_row(x: Tensor, keys: Tensor, values: Tensor, options: ThetaOptions) -> Tensor:
    parts, tokens = parts_of(x, keys, values), keys.shape[0]
    rows = x.reshape(-1, x.shape[-1])  # [R, d_in]
    some_keys = keys.reshape(parts, tokens // parts, keys.shape[1])
    some_values = values.reshape(parts, tokens // parts, values.shape[1])
    scores = torch.bmm(rows.expand(parts, -1, -1), some_keys.transpose(1, 2))  # [parts, R, n/parts]
    scores = scores.transpose(0, 1).reshape(len(rows), tokens)
    weights = options.weights(scores).to(scores.dtype)
    some_weights = weights.reshape(len(rows), parts, tokens // parts).transpose(0, 1)
    out = torch.bmm(some_weights, some_values).sum(0)  # [R, d_out]
    return out.reshape(*x.shape[:-1], values.shape[1])
