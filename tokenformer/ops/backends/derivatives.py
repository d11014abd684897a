"""The thetas with hand-written derivatives, in preallocated memory.

They do what autograd would do with `theta.py`, but need only the scores and one or two numbers per
row for the backward pass. Everything is computed in fp32 or wider, on blocks of rows that fit into
a core's cache, so that these passes cost little beside the matrix products.
"""

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from tokenformer.ops.theta import ThetaOptions, zero_is_infinite

CACHE_BYTES = 2 << 20
"""Size of a block of rows; up to four matrices of this size are in use at once."""

PRODUCT_ROWS = 1024
"""Rows per matrix product. Fewer make it slower, more need more memory for the passes between."""
MANY_TOKENS = 6144
"""From here on half as many rows are as fast and need half the memory."""

RowStats = tuple[Tensor, ...]
"""One or two numbers per row, [R, 1] each."""


class BackwardBlock(NamedTuple):
    """The inputs of a backward pass over some rows. All but the scores are overwritten."""

    scores: Tensor  # [R, n]
    grad: Tensor  # [R, n], of the weights; becomes that of the scores
    weights: Tensor  # [R, n], filled with the weights
    scratch: Tensor  # [R, n]
    stats: RowStats


class ThetaDerivative(ABC):
    """One theta, forward and backward. It needs one or two statistics over all scores of a row, and
    in the backward pass one sum; `sharded.py` exchanges those between processes that hold different
    tokens."""

    saved_per_row: int
    """Numbers per row that `fill_weights` returns for the backward pass."""
    statistics_per_row = 1
    """Statistics over all scores of a row."""

    def __init__(self, options: ThetaOptions) -> None:
        _, self.scale, self.approximate, self.eps = options

    @abstractmethod
    def row_statistics(self, scores: Tensor, scratch: Tensor) -> Tensor:
        """The statistics [R, statistics_per_row] of scores [R, n]; overwrites `scratch`."""

    @abstractmethod
    def combine(self, parts: Tensor) -> Tensor:
        """Statistics of all tokens from those of subsets of them, [P, R, statistics_per_row]."""

    @abstractmethod
    def fill_weights(
        self, scores: Tensor, weights: Tensor, statistics: Tensor | None = None
    ) -> RowStats:
        """Write the weights [R, n] of scores [R, n]; both may be the same tensor. Pass `statistics`
        of all tokens where these are a subset of them."""

    def backward(self, block: BackwardBlock) -> Tensor:
        """Returns the gradient of the scale, one number per row."""
        return self.backward_scores(block, self.backward_sums(block))

    @abstractmethod
    def backward_sums(self, block: BackwardBlock) -> Tensor:
        """First half of `backward`: the sum [R, 1] over these tokens that the second half needs
        over all tokens."""

    @abstractmethod
    def backward_scores(self, block: BackwardBlock, sums: Tensor) -> Tensor:
        """Second half: turns `block.grad` into the gradient of the scores."""


class L2Gelu(ThetaDerivative):
    """W = gelu(f A), f = sqrt(s) / (||A|| + eps); `L1Gelu` differs in the norm."""

    saved_per_row = 2
    order = 2
    power = 0.5

    def __init__(self, options: ThetaOptions) -> None:
        super().__init__(options)
        self.root = self.scale**self.power

    def row_statistics(self, scores: Tensor, scratch: Tensor) -> Tensor:
        return torch.linalg.vector_norm(scores, self.order, dim=-1, keepdim=True)

    def combine(self, parts: Tensor) -> Tensor:
        return torch.linalg.vector_norm(parts, self.order, dim=0)

    def fill_weights(
        self, scores: Tensor, weights: Tensor, statistics: Tensor | None = None
    ) -> RowStats:
        norm = self.row_statistics(scores, weights) if statistics is None else statistics
        norm = zero_is_infinite(norm)
        factor = self.root / (norm + self.eps)
        gelu_(torch.mul(scores, factor, out=weights), self.approximate)
        return factor, norm

    def backward_sums(self, block: BackwardBlock) -> Tensor:
        scores, grad, weights, scratch, stats = block
        torch.mul(scores, stats[0], out=weights)
        gelu_backward_(grad, weights, self.approximate)
        gelu_(weights, self.approximate)
        return torch.mul(grad, scores, out=scratch).sum(1, keepdim=True)  # dL / df

    def backward_scores(self, block: BackwardBlock, sums: Tensor) -> Tensor:
        factor = block.stats[0]
        block.grad.mul_(factor)
        self.subtract_norm(block, sums * factor**2 / self.root)
        return sums * factor * (self.power / self.scale)

    def subtract_norm(self, block: BackwardBlock, shrink: Tensor) -> None:
        """Subtract the gradient through the norm in the factor: d||A|| / dA = A / ||A||."""
        block.grad.addcmul_(block.scores, shrink / block.stats[1], value=-1)


class L1Gelu(L2Gelu):
    """W = gelu(f A), f = s / (||A||_1 + eps)."""

    order = 1
    power = 1.0

    def subtract_norm(self, block: BackwardBlock, shrink: Tensor) -> None:
        block.grad.addcmul_(torch.sign(block.scores, out=block.scratch), shrink, value=-1)


class GeluL2(ThetaDerivative):
    """W = f gelu(A), f = sqrt(s) / (||gelu(A)|| + eps)."""

    saved_per_row = 2

    def row_statistics(self, scores: Tensor, scratch: Tensor) -> Tensor:
        gelu(scores, scratch, self.approximate)
        return torch.linalg.vector_norm(scratch, dim=-1, keepdim=True)

    def combine(self, parts: Tensor) -> Tensor:
        return torch.linalg.vector_norm(parts, dim=0)

    def fill_weights(
        self, scores: Tensor, weights: Tensor, statistics: Tensor | None = None
    ) -> RowStats:
        if statistics is None:
            statistics = self.row_statistics(scores, weights)
        else:
            gelu(scores, weights, self.approximate)
        norm = zero_is_infinite(statistics)
        factor = self.scale**0.5 / (norm + self.eps)
        weights.mul_(factor)
        return factor, norm

    def backward_sums(self, block: BackwardBlock) -> Tensor:
        scores, grad, weights, scratch, _ = block
        gelu(scores, weights, self.approximate)
        return torch.mul(grad, weights, out=scratch).sum(1, keepdim=True)  # dL / df

    def backward_scores(self, block: BackwardBlock, sums: Tensor) -> Tensor:
        scores, grad, weights, _, (factor, norm) = block
        shrink = sums * factor**2 / (self.scale**0.5 * norm)
        grad.mul_(factor).addcmul_(weights, shrink, value=-1)
        gelu_backward_(grad, scores, self.approximate)
        weights.mul_(factor)
        return sums * factor / 2 / self.scale


class Softmax(ThetaDerivative):
    """W = s exp(A) / sum exp(A). The largest score and the sum are saved separately: with large
    scores a single log-sum-exp has too few digits for weights that add up to s."""

    saved_per_row = 2
    statistics_per_row = 2

    def row_statistics(self, scores: Tensor, scratch: Tensor) -> Tensor:
        if not scores.shape[-1]:
            return torch.cat([scores.new_full((len(scores), 1), v) for v in (-math.inf, 0.0)], 1)
        largest = scores.amax(-1, keepdim=True)
        total = torch.sub(scores, largest, out=scratch).exp_().sum(-1, keepdim=True)
        return torch.cat([largest, total], dim=1)

    def combine(self, parts: Tensor) -> Tensor:
        tops, totals = parts.split(1, dim=-1)
        largest = tops.amax(0)
        return torch.cat([largest, ((tops - largest).exp() * totals).sum(0)], dim=-1)

    def fill_weights(
        self, scores: Tensor, weights: Tensor, statistics: Tensor | None = None
    ) -> RowStats:
        if statistics is None:
            largest, total = self.row_statistics(scores, weights).split(1, dim=1)
        else:
            largest, total = statistics.split(1, dim=1)
            torch.sub(scores, largest, out=weights).exp_()
        weights.mul_(self.scale / total)
        return largest, total

    def backward_sums(self, block: BackwardBlock) -> Tensor:
        scores, grad, weights, scratch, (largest, total) = block
        torch.sub(scores, largest, out=weights).exp_().div_(total)
        return torch.mul(grad, weights, out=scratch).sum(1, keepdim=True)

    def backward_scores(self, block: BackwardBlock, sums: Tensor) -> Tensor:
        block.weights.mul_(self.scale)
        block.grad.sub_(sums).mul_(block.weights)
        return sums


DERIVATIVES: dict[str, type[ThetaDerivative]] = {
    "l2_gelu": L2Gelu,
    "gelu_l2": GeluL2,
    "l1_gelu": L1Gelu,
    "softmax": Softmax,
}


def rows_per_product(tokens: int) -> int:
    return PRODUCT_ROWS if tokens <= MANY_TOKENS else max(1, PRODUCT_ROWS // 2)


def cached_rows(matrix: Tensor) -> list[slice]:
    """The rows of a matrix in blocks that fit into a core's cache; on a GPU all at once."""
    rows, row_bytes = matrix.shape[0], matrix.shape[1] * matrix.itemsize
    step = max(8, CACHE_BYTES // max(1, row_bytes)) if matrix.device.type == "cpu" else rows
    return [slice(start, min(rows, start + step)) for start in range(0, rows, max(1, step))]


def gelu(inputs: Tensor, out: Tensor, approximate: str) -> None:
    torch.ops.aten.gelu.out(inputs, approximate=approximate, out=out)


def gelu_(inputs: Tensor, approximate: str) -> None:
    torch.ops.aten.gelu.out(inputs, approximate=approximate, out=inputs)


def gelu_backward_(grad: Tensor, inputs: Tensor, approximate: str) -> None:
    """Turn `grad`, of the output of GELU, into that of its input, in place."""
    torch.ops.aten.gelu_backward.grad_input(grad, inputs, approximate=approximate, grad_input=grad)


def product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """out = a b; a half-precision product is rounded once."""
    return torch.mm(a, b, out=out) if out.dtype == a.dtype else out.copy_(a @ b)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b; with half-precision inputs the product is rounded, the sum is not."""
    if total.dtype == b.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a.to(b.dtype) @ b)


def row_products(a: Tensor, b: Tensor) -> Tensor:
    """Inner products of the rows, [R, 1]."""
    return torch.linalg.vecdot(a, b).unsqueeze(1)
