"""Pattention and matrix products of a few rows on a CPU, at memory bandwidth.

For a single row BLAS reads a matrix on one thread, at half of that speed.
"""

import ctypes
from itertools import accumulate

import torch
from torch import Tensor

from tokenformer.ops.backends.interface import is_trained
from tokenformer.ops.backends.native.library import (
    KINDS,
    SUFFIXES,
    Matrix,
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
MATRIX_DTYPES = (torch.float32, torch.bfloat16, torch.int8)
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


def matrix_pointers(matrix: Tensor, scales: Tensor | None = None) -> Matrix | None:
    """Return pointers to a matrix [n, width] or a vector [width] in fp32, bf16, or int8 with scales
    [n]; None if native code cannot take it."""
    if (matrix.dtype == torch.int8) != (scales is not None) or matrix.dtype not in MATRIX_DTYPES:
        return None
    parts = [part for part in (matrix, scales) if part is not None]
    if not all(part.is_cpu and part.is_contiguous() for part in parts):
        return None
    if scales is not None and scales.dtype != torch.float32:
        return None
    shape = matrix.shape if matrix.ndim == 2 else (1, *matrix.shape)
    addresses = matrix.data_ptr(), None if scales is None else scales.data_ptr()
    return Matrix(*addresses, *shape, KINDS[matrix.dtype])


def theta_struct(theta: str, approximate: str, eps: float) -> Theta:
    return Theta(ORDER[theta], approximate == "tanh", eps)


def pattention(x: Tensor, tokens: Tokens, dtype: torch.dtype, theta: Theta) -> Tensor:
    """x [..., d_in] -> [..., d_out], over tokens of this dtype."""
    rows, active = x.numel() // tokens.d_in, tokens.routing.active
    threads = threads_for(bytes_per_row(tokens, dtype))
    inputs = x.float().contiguous()
    out = inputs.new_empty(*x.shape[:-1], tokens.d_out)
    _buffer, work = workspace(
        threads, rows * scores_per_row(tokens), rows, rows * tokens.d_out, rows * active
    )
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
    threads: int, scores: int, norms: int, outputs: int, chosen: int, spare: int = 0
) -> tuple[Tensor, Work]:
    """Return a buffer and pointers into it: scores, then norms and output sums of every thread,
    then `chosen` groups, their gates and `spare` numbers. Keep the tensor alive while the pointers
    are used."""
    sizes = [0, scores, threads * norms, threads * norms, threads * outputs, chosen, chosen]
    buffer = torch.empty(  # whatever torch's defaults are
        sum(sizes) + spare, dtype=torch.float32, device="cpu"
    )
    starts = list(accumulate(sizes))
    return buffer, Work(*(buffer.data_ptr() + 4 * start for start in starts[:-1]))


def scores_per_row(tokens: Tokens) -> int:
    """Scores that all threads share: of all tokens, or of the groups."""
    return int(tokens.routing.router.n if tokens.routing.size else tokens.n)


def bytes_per_row(tokens: Tokens, dtype: torch.dtype) -> int:
    """Bytes of the keys that a row attends to."""
    routing = tokens.routing
    count = min(tokens.n, routing.size * routing.active) if routing.size else tokens.n
    return int(count * tokens.d_in * dtype.itemsize)


def threads_for(size: int) -> int:
    """Return the number of threads to read `size` bytes with."""
    return max(1, min(torch.get_num_threads(), size // BYTES_PER_THREAD))
