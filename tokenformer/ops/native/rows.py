"""Pattention, and a matrix, of one or a few rows on a CPU: as fast as memory is read.

BLAS reads a matrix for a single row at half of that speed, and on one thread.
"""

import ctypes

import torch
from torch import Tensor

from tokenformer.ops.native.library import SUFFIXES, Rule, Tokens, Work, function, library
from tokenformer.ops.rules import Scale, is_trained
from tokenformer.ops.theta import THETAS

MOST_ROWS = 8
"""Beyond, a matrix product is faster: it does more with a token while it is at hand."""
BYTES_A_THREAD = 1 << 16
"""What a thread must have to read, to be worth waking."""
ORDER = {theta: number for number, theta in enumerate(THETAS)}


def suits(x: Tensor, *matrices: Tensor) -> bool:
    """Whether it can take these rows over these matrices; a backward pass cannot follow."""
    return (
        0 < x.numel() <= MOST_ROWS * x.shape[-1]
        and x.is_cpu
        and x.dtype in (torch.float32, torch.bfloat16)
        and all(m.shape[1] == x.shape[-1] for m in matrices[:1])
        and all(m.is_cpu and m.dtype in SUFFIXES and m.is_contiguous() for m in matrices)
        and not torch.is_autocast_enabled("cpu")
        and library() is not None
    )


def native(
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: Scale,
    theta: str,
    approximate: str,
    eps: float,
) -> Tensor:
    """The backend of this name."""
    if is_trained(x, keys, values, scale) or not suits(x, keys, values):
        raise ValueError(
            f"backend='native' is for 1 to {MOST_ROWS} rows and contiguous tokens in fp32 or bf16 "
            "on a CPU, without gradients or autocast, and needs a C++ compiler; backend='auto' "
            "takes it where it can"
        )
    return pattention(x, tokens(keys, values, scale), keys.dtype, rule(theta, approximate, eps))


def tokens(
    keys: Tensor,
    values: Tensor,
    scale: Scale,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tokens:
    """What is read, where it lies in memory; the scales, [n], are those of int8 tokens."""
    return Tokens(
        keys.data_ptr(),
        values.data_ptr(),
        None if key_scales is None else key_scales.data_ptr(),
        None if value_scales is None else value_scales.data_ptr(),
        *keys.shape,
        values.shape[1],
        float(scale),
    )


def rule(theta: str, approximate: str, eps: float) -> Rule:
    return Rule(ORDER[theta], approximate == "tanh", eps)


def pattention(x: Tensor, of: Tokens, dtype: torch.dtype, by: Rule) -> Tensor:
    """x [..., d_in] -> [..., d_out], over tokens of that dtype."""
    rows, threads = x.numel() // of.d_in, threads_for(of.n * of.d_in * dtype.itemsize)
    inputs = x.float().contiguous()
    out = inputs.new_empty(*x.shape[:-1], of.d_out)
    _room, work = workspace(threads, rows * of.n, rows, rows * of.d_out)
    function("pattention", dtype)(
        inputs.data_ptr(), rows, ctypes.byref(of), by, work, out.data_ptr(), threads
    )
    return out.to(x.dtype)


def linear(x: Tensor, weight: Tensor, scales: Tensor | None = None) -> Tensor:
    """x [..., d_in] times weight [n, d_in], transposed; of int8 with a scale for each row."""
    count, d_in = weight.shape
    inputs = x.float().contiguous()
    out = inputs.new_empty(*x.shape[:-1], count)
    function("linear", weight.dtype)(
        inputs.data_ptr(),
        x.numel() // d_in,
        d_in,
        weight.data_ptr(),
        None if scales is None else scales.data_ptr(),
        count,
        out.data_ptr(),
        threads_for(weight.numel() * weight.itemsize),
    )
    return out.to(x.dtype)


def workspace(
    threads: int, scores: int, norms: int, outputs: int, spare: int = 0
) -> tuple[Tensor, Work]:
    """Room for so many scores, for each thread so many norms and sums, and more at its end; and
    where it lies. The tensor must be held while it is worked in."""
    count = scores + threads * (2 * norms + outputs) + spare
    room = torch.empty(count, dtype=torch.float32, device="cpu")  # whatever the defaults are
    totals = room.data_ptr() + 4 * scores
    tops = totals + 4 * threads * norms
    return room, Work(room.data_ptr(), totals, tops, tops + 4 * threads * norms)


def threads_for(size: int) -> int:
    """How many threads read so many bytes."""
    return max(1, min(torch.get_num_threads(), size // BYTES_A_THREAD))
