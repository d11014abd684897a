"""Pattention on a GPU in fused kernels: scores are made on the chip, used there and dropped.

    pattention(x, keys, values, backend="triton")

Tested in Triton's interpreter only, against the reference; its kernels compile for GPUs, but have
not yet run on one nor been timed. So it is named, never chosen. Inputs are float32, bfloat16 or
float16, sums float32; float64 is refused.

A row's norm comes from a pass of its own over the scores; with it weights are a function of a score
and a number a row, so tiles of them can be made again wherever they are needed:

    out = theta(A) V      dx = (dL/dA) K      dV = theta(A)^T dout      dK = (dL/dA)^T x

are one kernel, and dL/dA too is a function of a score, its weight's gradient and two numbers a row.
With t = dL / d log f of a row, f being the factor its norm ||A|| decides, and dW = dout V^T,

    l2_gelu   f gelu'(f A) dW - c A              c = t / (||A|| (||A|| + eps))
    gelu_l2   gelu'(A) (f dW - c gelu(A))        c = t / (||g|| (||g|| + eps)),  g = gelu(A)
    l1_gelu   f gelu'(f A) dW - c sign(A)        c = t / (||A||_1 + eps)
    softmax   theta(A) (dW - c)                  c = t / s

Up to 4096 channels of a result are more than a processor has registers for. So a program owns one
tile of it, 64 rows by 256 channels in half precision, and makes the scores again for each: at width
768 a training step is 25 products instead of the least possible 6, at 256 it is 13. Sums kept in
memory would save that from about a thousand channels on, by the bytes they move, but need atomics,
whose order varies, or a program that reads what it wrote, which Triton's pipelining does not look
out for. This way every number is written once and the results are deterministic. What is won is
memory, and time in narrow layers, where passes over the scores outweigh the products.
"""

from types import ModuleType

import torch
from torch import Tensor

from tokenformer.ops.rules import Grads, Kept, Scale, zero_is_infinite

BLOCK_ROWS = 64
BLOCK_TOKENS = 64
INNER_BYTES = 128
"""Of the channels that one step of an inner product takes."""
OUTER_BYTES = 512
"""Of the channels of one tile of a result."""
SMALLEST = 16
"""Side of what a matrix unit takes."""

POWERS = {"l2_gelu": 0.5, "gelu_l2": 0.5, "l1_gelu": 1.0, "softmax": 1.0}
"""Of the scale, in the factor of a row."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Pair = tuple[Tensor, Tensor]
"""Two matrices whose rows are multiplied with each other."""
Numbers = tuple[Tensor | None, Tensor | None]
"""Of each row, [R, 1]: the factor f, and for softmax the largest score."""


class Fused:
    """One theta."""

    def __init__(self, theta: str, scale: Scale, approximate: str, eps: float) -> None:
        self.theta, self.scale = theta, scale
        self.eps = 0.0 if theta == "softmax" else eps
        self.power = POWERS[theta]
        self.options = {"THETA": theta, "TANH": approximate == "tanh"}

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, *, keep: bool = True
    ) -> tuple[Tensor, Kept]:
        """Rows [R, d_in] -> [R, d_out]; kept are the norms of the rows' scores, [R, 1], and for
        softmax the largest scores, [R, 1]."""
        check(x)
        x, keys, values = x.contiguous(), keys.contiguous(), values.contiguous()
        kept = self.norms(x, keys)
        out = x.new_empty(x.shape[0], values.shape[1])
        self.mix(out, values, (x, keys), self.numbers(kept))
        return out, kept

    def backward(self, grad: Tensor, x: Tensor, keys: Tensor, values: Tensor, kept: Kept) -> Grads:
        dx, dkeys, dvalues = (torch.empty_like(tensor) for tensor in (x, keys, values))
        x, keys, values = x.contiguous(), keys.contiguous(), values.contiguous()
        numbers = self.numbers(kept)
        slopes = self.row_sums((x, keys), numbers, (grad, values)).sum(0).unsqueeze(1)  # t
        shrinks = slopes / self.lengths(kept[0])  # c
        self.mix(dx, keys, (x, keys), numbers, (grad, values), shrinks)
        self.mix(dkeys, x, (keys, x), numbers, (values, grad), shrinks, by_rows=False)
        self.mix(dvalues, grad, (keys, x), numbers, by_rows=False)
        return dx, dkeys, dvalues, slopes.sum() * self.power / self.scale

    def norms(self, x: Tensor, keys: Tensor) -> Kept:
        if self.theta == "softmax":
            tops = x.new_empty(tiles(keys), len(x), dtype=torch.float32)
            parts = self.row_sums((x, keys), (None, tops))
            top = tops.amax(0)
            total = (parts * (tops - top).exp()).sum(0)
            return total.unsqueeze(1), top.unsqueeze(1)
        total = self.row_sums((x, keys), (None, None)).sum(0).unsqueeze(1)
        return (zero_is_infinite(total if self.theta == "l1_gelu" else total.sqrt()),)

    def numbers(self, kept: Kept) -> Numbers:
        norm, *tops = kept
        return self.scale**self.power / (norm + self.eps), tops[0] if tops else None

    def lengths(self, norm: Tensor) -> Scale:
        """t / c."""
        if self.theta == "softmax":
            return self.scale
        return norm + self.eps if self.theta == "l1_gelu" else norm * (norm + self.eps)

    def row_sums(self, scored: Pair, numbers: Numbers, weighed: Pair | None = None) -> Tensor:
        """[tiles of tokens, R]: parts of the norms, or of t where the gradient is given."""
        x, keys = scored
        rows, tokens = len(x), len(keys)
        block_rows, block_tokens = side(rows, BLOCK_ROWS), side(tokens, BLOCK_TOKENS)
        sums = x.new_empty(tiles(keys), rows, dtype=torch.float32)
        with torch.cuda.device_of(x):
            programs().row_sums[-(-rows // block_rows), len(sums)](
                *scored,
                *(weighed or (None, None)),
                *numbers,
                sums,
                rows,
                tokens,
                *widths(scored, weighed),
                **self.options,
                BACKWARD=weighed is not None,
                BLOCK_ROWS=block_rows,
                BLOCK_TOKENS=block_tokens,
                INNER=channels(x, INNER_BYTES),
            )
        return sums

    def mix(
        self,
        out: Tensor,
        mixed: Tensor,
        scored: Pair,
        numbers: Numbers,
        weighed: Pair | None = None,
        shrinks: Tensor | None = None,
        *,
        by_rows: bool = True,
    ) -> None:
        """Fill `out` with sums of the rows of `mixed`, weighted by theta or by its gradient."""
        count, others = len(scored[0]), len(scored[1])
        blocks = (BLOCK_ROWS, BLOCK_TOKENS) if by_rows else (BLOCK_TOKENS, BLOCK_ROWS)
        sides = side(count, blocks[0]), side(others, blocks[1])
        outer = side(mixed.shape[1], channels(mixed, OUTER_BYTES))
        grid = -(-count // sides[0]), -(-mixed.shape[1] // outer)
        with torch.cuda.device_of(out):
            programs().mixtures[grid](
                *scored,
                *(weighed or (None, None)),
                mixed,
                *numbers,
                shrinks,
                out,
                count,
                others,
                *widths(scored, weighed),
                mixed.shape[1],
                *out.stride(),
                **self.options,
                BACKWARD=weighed is not None,
                BY_ROWS=by_rows,
                BLOCK=sides[0],
                BLOCK_OTHERS=sides[1],
                INNER=channels(mixed, INNER_BYTES),
                OUTER=outer,
                num_warps=8,
            )


def side(size: int, most: int) -> int:
    """Of a tile: a power of two, not much more than is needed."""
    return min(most, max(SMALLEST, 1 << (size - 1).bit_length()))


def tiles(keys: Tensor) -> int:
    return -(-len(keys) // side(len(keys), BLOCK_TOKENS))


def channels(tensor: Tensor, most_bytes: int) -> int:
    return max(SMALLEST, most_bytes // tensor.itemsize)


def widths(scored: Pair, weighed: Pair | None) -> tuple[int, int]:
    return scored[0].shape[1], weighed[0].shape[1] if weighed else 0


def programs() -> ModuleType:
    """The kernels, imported when they are first asked for: most installations have no triton."""
    try:
        from tokenformer.ops import fused_kernels
    except ModuleNotFoundError as error:
        raise RuntimeError(
            "backend='triton' needs triton, which is for Linux: pip install 'tokenformer[gpu]'; "
            "or take backend='auto'"
        ) from error
    return fused_kernels


def check(x: Tensor) -> None:
    if x.dtype not in DTYPES:
        raise TypeError(
            f"backend='triton' takes float32, bfloat16 or float16, not {x.dtype}; "
            "take backend='auto', or convert the inputs"
        )
    if not x.is_cuda and not programs().INTERPRETED:
        raise RuntimeError(
            f"backend='triton' needs tensors on a GPU, got {x.device}: move them, or take "
            "backend='auto'; TRITON_INTERPRET=1, set before Python starts, runs it without a GPU, "
            "for tests"
        )
