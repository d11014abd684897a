"""Routed pattention of a few rows on a CPU, without gradients: reads only the chosen groups."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer.ops.backends.native.few_rows import MAX_ROWS, threads_for
from tokenformer.ops.backends.native.library import function, library
from tokenformer.ops.theta import ThetaOptions

DTYPES = (torch.float32, torch.bfloat16)


def supports(x: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether native code can take these rows [R, d_in] and tokens."""
    tokens = (keys, values)
    return (
        0 < x.shape[0] <= MAX_ROWS
        and x.is_cpu
        and x.dtype in DTYPES
        and all(t.is_cpu and t.dtype in DTYPES and t.is_contiguous() for t in tokens)
        and keys.dtype == values.dtype
        and library() is not None
    )


def run(
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    groups: Tensor,
    gates: Tensor | None,
    norms: Tensor | None,
    options: ThetaOptions,
    group_size: int,
) -> Tensor:
    """Rows x [R, d_in] with groups [R, k], gates [R, k] and norms [R, 1] -> [R, d_out]."""
    (rows, k), (tokens, d_out) = groups.shape, values.shape
    if not k:
        return x.new_zeros(rows, d_out)
    inputs, chosen = x.float().contiguous(), groups.contiguous()
    lowest, highest = (int(edge) for edge in chosen.aminmax())
    if lowest < 0 or highest * group_size >= tokens:
        raise IndexError(
            f"groups must be from 0 to {-(-tokens // group_size) - 1}, got {lowest} to {highest}"
        )
    missing = float("-inf") if options.theta == "softmax" else 0.0
    scores = inputs.new_full((rows, k * group_size), missing)
    threads = threads_for(scores.numel() * keys.shape[1] * keys.itemsize)
    sizes = chosen.data_ptr(), k, group_size
    function("routed_scores", keys.dtype)(
        inputs.data_ptr(),
        rows,
        keys.shape[1],
        *sizes,
        keys.data_ptr(),
        tokens,
        scores.data_ptr(),
        threads,
    )
    if norms is None:
        weights = options.weights(scores)
    else:
        factor = options.scale**0.5 / (norms + options.eps)  # l2_gelu
        weights = F.gelu(scores * factor, approximate=options.approximate)
    if gates is not None:
        weights = (weights.view(rows, k, group_size) * gates[..., None]).view_as(scores)
    weights = weights.float().contiguous()
    sums, out = inputs.new_empty(threads, rows, d_out), inputs.new_empty(rows, d_out)
    function("routed_sum", values.dtype)(
        weights.data_ptr(),
        rows,
        d_out,
        *sizes,
        values.data_ptr(),
        tokens,
        sums.data_ptr(),
        out.data_ptr(),
        threads,
    )
    return out.to(x.dtype)
