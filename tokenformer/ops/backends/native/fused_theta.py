"""Norm, scale and GELU of `l2_gelu` in one native pass over the scores, and its derivative in one.

`direct` calls it between its matrix products. torch's operations take three passes forward and
seven backward, which in a narrow model cost as much as the products.
"""

import torch
from torch import Tensor

from tokenformer.ops.backends.native.library import function, library
from tokenformer.ops.theta import ThetaOptions

ELEMENTS_PER_THREAD = 1 << 14
"""Scores of each thread at least; starting a thread for fewer costs more than it saves."""


def supports_fused(x: Tensor, options: ThetaOptions) -> bool:
    """Whether scores of `x` can be computed natively: `l2_gelu` with exact GELU, fp32 on a CPU."""
    return (
        options.theta == "l2_gelu"
        and options.approximate == "none"
        and x.is_cpu
        and x.dtype == torch.float32
        and library() is not None
    )


def fill_weights(scores: Tensor, weights: Tensor, stats: Tensor, options: ThetaOptions) -> None:
    """Write the weights of scores [R, n] to `weights` [R, n], and the factor and norm of every row
    to `stats` [R, 2]. All are contiguous."""
    function("l2_gelu_forward", scores.dtype)(
        scores.data_ptr(),
        *scores.shape,
        float(options.scale) ** 0.5,
        options.eps,
        weights.data_ptr(),
        stats.data_ptr(),
        threads_for(scores),
    )


def backward(
    scores: Tensor, stats: Tensor, grad: Tensor, weights: Tensor, options: ThetaOptions
) -> Tensor:
    """Turn the gradient of the weights [R, n] into that of the scores, in place, and fill the
    weights. Returns the gradient of the scale, one number per row."""
    sums = stats.new_empty(len(stats))
    scale = float(options.scale)
    function("l2_gelu_backward", scores.dtype)(
        scores.data_ptr(),
        stats.data_ptr(),
        *scores.shape,
        scale**0.5,
        grad.data_ptr(),
        weights.data_ptr(),
        sums.data_ptr(),
        threads_for(scores),
    )
    return sums * stats[:, 0] * (0.5 / scale)


def threads_for(scores: Tensor) -> int:
    return max(1, min(torch.get_num_threads(), scores.numel() // ELEMENTS_PER_THREAD))
