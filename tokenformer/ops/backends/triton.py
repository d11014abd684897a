"""Pattention in fused GPU kernels: scores are computed on chip, used and dropped.

    pattention(x, keys, values, backend="triton")

Tested against the reference in Triton's interpreter only. The kernels compile for GPUs, but have
not run on one, so `auto` never chooses this backend. Inputs are float32, bfloat16 or float16, sums
float32; float64 is refused.

A row's norm comes from a pass of its own over the scores. Given the norm, a weight is a function of
one score and one number per row, so tiles of weights can be recomputed wherever they are needed:

    out = theta(A) V      dx = (dL/dA) K      dV = theta(A)^T dout      dK = (dL/dA)^T x

are one kernel, and dL/dA is a function of a score, its weight's gradient and two numbers per row.
With t = dL / d log f of a row, f being the factor its norm ||A|| decides, and dW = dout V^T,

    l2_gelu   f gelu'(f A) dW - c A              c = t / (||A|| (||A|| + eps))
    gelu_l2   gelu'(A) (f dW - c gelu(A))        c = t / (||g|| (||g|| + eps)),  g = gelu(A)
    l1_gelu   f gelu'(f A) dW - c sign(A)        c = t / (||A||_1 + eps)
    softmax   theta(A) (dW - c)                  c = t / s

The channels of a result do not fit into a processor's registers, so a program owns one tile of it,
64 rows by 256 channels in half precision, and recomputes the scores for each: at width 768 a
training step takes 25 products instead of the minimum of 6, at 256 it takes 13. Accumulating in
memory would avoid that from about a thousand channels on, but needs atomics, whose order varies, or
a program that reads what it wrote, which Triton's pipelining does not support. This way every
number is written once and results are deterministic. The gain is memory, and time in narrow layers,
where passes over the scores outweigh the products.
"""

from types import ModuleType

import torch
from torch import Tensor

from tokenformer.installation import install_hint
from tokenformer.ops.backends.interface import Gradients, Kernel, Saved, SavedTensor, Sizes
from tokenformer.ops.theta import ThetaOptions, zero_is_infinite

BLOCK_ROWS = 64
BLOCK_TOKENS = 64
INNER_BYTES = 128
"""Channels per step of an inner product, in bytes."""
OUTER_BYTES = 512
"""Channels per tile of a result, in bytes."""
SMALLEST = 16
"""Smallest tile side of a matrix unit."""

POWERS = {"l2_gelu": 0.5, "gelu_l2": 0.5, "l1_gelu": 1.0, "softmax": 1.0}
"""Power of the scale in the factor of a row."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Pair = tuple[Tensor, Tensor]
"""Two matrices whose rows are multiplied with each other."""
Numbers = tuple[Tensor | None, Tensor | None]
"""Per row, [R, 1]: the factor f, and for softmax the largest score."""


class Triton(Kernel):
    def __init__(self, options: ThetaOptions) -> None:
        super().__init__(options)
        self.theta, self.scale = options.theta, options.scale
        self.eps = 0.0 if self.theta == "softmax" else options.eps
        self.power = POWERS[self.theta]
        self.constants = {"THETA": self.theta, "TANH": options.approximate == "tanh"}

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, *, save: bool = True
    ) -> tuple[Tensor, Saved]:
        """Saves the norms of the rows' scores [R, 1], for softmax also the largest scores."""
        check(x)
        x, keys, values = x.contiguous(), keys.contiguous(), values.contiguous()
        saved = self.norms(x, keys)
        out = x.new_empty(x.shape[0], values.shape[1])
        self.mix(out, values, (x, keys), self.numbers(saved))
        return out, saved

    def backward(
        self, grad: Tensor, x: Tensor, keys: Tensor, values: Tensor, saved: Saved
    ) -> Gradients:
        dx, dkeys, dvalues = (torch.empty_like(tensor) for tensor in (x, keys, values))
        x, keys, values = x.contiguous(), keys.contiguous(), values.contiguous()
        numbers = self.numbers(saved)
        slopes = self.row_sums((x, keys), numbers, (grad, values)).sum(0).unsqueeze(1)  # t
        shrinks = slopes / self.lengths(saved[0])  # c
        self.mix(dx, keys, (x, keys), numbers, (grad, values), shrinks)
        self.mix(dkeys, x, (keys, x), numbers, (values, grad), shrinks, by_rows=False)
        self.mix(dvalues, grad, (keys, x), numbers, by_rows=False)
        return dx, dkeys, dvalues, slopes.sum() * self.power / self.scale

    def saved_tensors(self, sizes: Sizes, dtype: torch.dtype) -> list[SavedTensor]:
        per_row = SavedTensor((sizes.rows, 1), torch.float32)
        return [per_row, per_row] if self.theta == "softmax" else [per_row]

    def norms(self, x: Tensor, keys: Tensor) -> Saved:
        if self.theta == "softmax":
            tops = x.new_empty(tiles(keys), len(x), dtype=torch.float32)
            parts = self.row_sums((x, keys), (None, tops))
            top = tops.amax(0)
            total = (parts * (tops - top).exp()).sum(0)
            return total.unsqueeze(1), top.unsqueeze(1)
        total = self.row_sums((x, keys), (None, None)).sum(0).unsqueeze(1)
        return (zero_is_infinite(total if self.theta == "l1_gelu" else total.sqrt()),)

    def numbers(self, saved: Saved) -> Numbers:
        norm, *tops = saved
        return self.scale**self.power / (norm + self.eps), tops[0] if tops else None

    def lengths(self, norm: Tensor) -> float | Tensor:
        """The ratio t / c."""
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
                **self.constants,
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
        """Fill `out` with sums of the rows of `mixed`, weighted by theta or its gradient."""
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
                **self.constants,
                BACKWARD=weighed is not None,
                BY_ROWS=by_rows,
                BLOCK=sides[0],
                BLOCK_OTHERS=sides[1],
                INNER=channels(mixed, INNER_BYTES),
                OUTER=outer,
                num_warps=8,
            )


def side(size: int, most: int) -> int:
    """Side of a tile: the smallest power of two that holds `size`, from SMALLEST to `most`."""
    return min(most, max(SMALLEST, 1 << (size - 1).bit_length()))


def tiles(keys: Tensor) -> int:
    return -(-len(keys) // side(len(keys), BLOCK_TOKENS))


def channels(tensor: Tensor, most_bytes: int) -> int:
    return max(SMALLEST, most_bytes // tensor.itemsize)


def widths(scored: Pair, weighed: Pair | None) -> tuple[int, int]:
    return scored[0].shape[1], weighed[0].shape[1] if weighed else 0


def programs() -> ModuleType:
    """The kernels, imported on first use: most installations have no triton."""
    try:
        from tokenformer.ops.backends import triton_kernels
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"backend='triton' needs triton, which is for Linux: {install_hint('gpu')}; "
            "or use backend='auto'"
        ) from error
    return triton_kernels


def check(x: Tensor) -> None:
    if x.dtype not in DTYPES:
        raise TypeError(
            f"backend='triton' takes float32, bfloat16 or float16, not {x.dtype}; "
            "use backend='auto', or convert the inputs"
        )
    if not x.is_cuda and not programs().INTERPRETED:
        raise RuntimeError(
            f"backend='triton' needs tensors on a GPU, got {x.device}: move them, or use "
            "backend='auto'; TRITON_INTERPRET=1, set before Python starts, runs it without a GPU, "
            "for tests"
        )
