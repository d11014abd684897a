"""Pattention over the tokens of a layer and added ones that may differ from sample to sample.

    pattention_with_added(x, keys, values, added_keys, added_values, options)

equals `pattention` over all these tokens, for every theta. The tokens themselves are not
concatenated: that would copy the weights of the layer for every decoded token, and once per sample
in a batch whose samples have tokens of their own.
"""

import math

import torch
from torch import Tensor

from tokenformer.ops.backends.auto import can_use_native
from tokenformer.ops.backends.native import linear
from tokenformer.ops.theta import ThetaOptions, accumulation_dtype


def pattention_with_added(
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    added_keys: Tensor,
    added_values: Tensor,
    options: ThetaOptions,
) -> Tensor:
    """Attend from x [B, ..., d_in] to keys [n, d_in] and to added keys [m, d_in], or [B, m, d_in]
    for other tokens in every sample. A token with a zero key pads the tokens of a sample without
    an effect, except for softmax."""
    scores = linear(x, keys) if can_use_native(x, keys) else x @ keys.T  # [B, ..., n]
    weights = options.weights(torch.cat([scores, added_scores(x, added_keys)], dim=-1))
    weights = weights.to(scores.dtype)
    count = keys.shape[0]
    return weights[..., :count] @ values + weighted_sum(weights[..., count:], added_values)


def pattention_per_sample(
    x: Tensor, keys: Tensor, values: Tensor, counts: Tensor, options: ThetaOptions
) -> Tensor:
    """Attend from x [B, ..., d_in] to the first `counts` [B] tokens of every sample, whose number
    is also their scale. The keys [B, m, d_in] behind them must be zero."""
    scores = added_scores(x, keys)
    counts = counts.reshape(-1, *(1 for _ in range(scores.ndim - 1)))  # [B, 1, ...]
    if options.theta == "softmax":  # by the others a zero score has no weight
        places = torch.arange(scores.shape[-1], device=scores.device)
        scores = scores.masked_fill(places >= counts, -math.inf)
    options = options._replace(scale=counts.to(accumulation_dtype(scores.dtype)))
    return weighted_sum(options.weights(scores).to(scores.dtype), values)


def added_scores(x: Tensor, keys: Tensor) -> Tensor:
    if keys.ndim == 2:
        return x @ keys.T
    rows = x.reshape(x.shape[0], -1, x.shape[-1])  # [B, T, d_in]
    return (rows @ keys.mT).reshape(*x.shape[:-1], keys.shape[1])  # [B, ..., m]


def weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    if values.ndim == 2:
        return weights @ values
    rows = weights.reshape(weights.shape[0], -1, weights.shape[-1])  # [B, T, m]
    return (rows @ values).reshape(*weights.shape[:-1], values.shape[-1])  # [B, ..., d_out]
