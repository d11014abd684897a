"""Pattention and matrix products of a few rows on a CPU, at memory bandwidth.

For a single row BLAS reads a matrix on one thread, at half of that speed.
"""

import ctypes

import torch
from torch import Tensor

from tokenformer.ops.backends.interface import is_trained
from tokenformer.ops.backends.native.library import (
    SUFFIXES,
    Theta,
    Tokens,
    Work,
    function,
    library,
)
from tokenformer.ops.theta import THETAS, ThetaOptions

MAX_ROWS = 16
"""With more rows the matrix products of BLAS are faster."""
MAX_QUANTIZED_ROWS = 64
"""The same for quantized tokens, which a matrix product needs dequantized."""
BYTES_PER_THREAD = 1 << 16
"""Bytes each thread reads at least; starting a thread for fewer costs more than it saves."""
QUANTIZED = (torch.int8, torch.uint8)
ORDER = {theta: number for number, theta in enumerate(THETAS)}


def supports(x: Tensor, *matrices: Tensor) -> bool:
    """Whether native code can take these rows and matrices. There is no backward pass. The width of
    quantized matrices is not compared: 4-bit ones are packed."""
    most = MAX_QUANTIZED_ROWS if any(m.dtype in QUANTIZED for m in matrices) else MAX_ROWS
    return (
        0 < x.numel() <= most * x.shape[-1]
        and x.is_cpu
        and x.dtype in (torch.float32, torch.bfloat16)
        and all(m.shape[1] == x.shape[-1] or m.dtype in QUANTIZED for m in matrices[:1])
        and all(m.is_cpu and m.dtype in SUFFIXES and m.is_contiguous() for m in matrices)
        and not torch.is_autocast_enabled("cpu")
        and library() is not None
    )


def run_native(x: Tensor, keys: Tensor, values: Tensor, options: ThetaOptions) -> Tensor:
    """`backend="native"`."""
    theta, scale, approximate, eps = options
    if is_trained(x, keys, values, scale) or not supports(x, keys, values):
        raise ValueError(
            f"backend='native' is for 1 to {MAX_ROWS} rows and contiguous tokens in fp32 or bf16 "
            "on a CPU, without gradients or autocast, and needs a C++ compiler; backend='auto' "
            "uses it where it can"
        )
    return pattention(
        x, token_pointers(keys, values, scale), keys.dtype, theta_struct(theta, approximate, eps)
    )


def token_pointers(keys: Tensor, values: Tensor, scale: float | Tensor) -> Tokens:
    """Return pointers to keys and values that are not quantized."""
    pointers = keys.data_ptr(), values.data_ptr(), None, None
    return Tokens(*pointers, *keys.shape, values.shape[1], float(scale))


def theta_struct(theta: str, approximate: str, eps: float) -> Theta:
    return Theta(ORDER[theta], approximate == "tanh", eps)


def pattention(x: Tensor, tokens: Tokens, dtype: torch.dtype, theta: Theta) -> Tensor:
    """x [..., d_in] -> [..., d_out], over tokens of this dtype."""
    rows, threads = x.numel() // tokens.d_in, threads_for(tokens.n * tokens.d_in * dtype.itemsize)
    inputs = x.float().contiguous()
    out = inputs.new_empty(*x.shape[:-1], tokens.d_out)
    _buffer, work = workspace(threads, rows * tokens.n, rows, rows * tokens.d_out)
    function("pattention", dtype)(
        inputs.data_ptr(), rows, ctypes.byref(tokens), theta, work, out.data_ptr(), threads
    )
    return out.to(x.dtype)


def linear(x: Tensor, weight: Tensor, scales: Tensor | None = None) -> Tensor:
    """x [..., d_in] times the transposed weight [n, d_in]; an int8 weight has a scale per row."""
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
    """Return a buffer and pointers into it: scores, then norms and output sums of every thread,
    then `spare` numbers. Keep the tensor alive while the pointers are in use."""
    count = scores + threads * (2 * norms + outputs) + spare
    buffer = torch.empty(count, dtype=torch.float32, device="cpu")  # whatever torch's defaults are
    totals = buffer.data_ptr() + 4 * scores
    tops = totals + 4 * threads * norms
    return buffer, Work(buffer.data_ptr(), totals, tops, tops + 4 * threads * norms)


def threads_for(size: int) -> int:
    """Return the number of threads to read `size` bytes with."""
    return max(1, min(torch.get_num_threads(), size // BYTES_PER_THREAD))
