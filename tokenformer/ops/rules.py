"""The thetas by hand: weights from scores, and back, in memory that is there already.

What autograd would do with `theta.py`, written out so that nothing but the scores and one or two
numbers a row need be kept for the backward pass. Whatever is computed here is in fp32 or wider, on
a few rows at a time, which a core's cache holds: the passes then cost little beside the products.
"""

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from tokenformer.ops.theta import accumulation_dtype

CACHED_BYTES = 2 << 20
"""Of the rows of a pass; there are up to four matrices of them."""

Stats = tuple[Tensor, ...]
"""A number or two a row, [R, 1] each."""
Scale = float | Tensor
Kept = tuple[Tensor, ...]
"""What a backward pass needs besides the inputs."""
Grads = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of rows, keys, values and scale."""


class Pass(NamedTuple):
    """What a backward pass over some rows has before it; all but the scores are written to."""

    scores: Tensor  # [R, n]
    grad: Tensor  # [R, n], of the weights; becomes that of the scores
    weights: Tensor  # [R, n], to be filled with the weights again
    work: Tensor  # [R, n], to be spoilt
    stats: Stats


class Rule(ABC):
    """A theta. Of all the scores of a row it needs to know a number or two, and in its backward
    pass a sum; processes that have some of the tokens each exchange those (`sharded.py`)."""

    numbers: int
    """How many statistics there are."""
    measures = 1
    """How many of them must be measured over all scores of a row."""

    def __init__(self, scale: Scale, approximate: str, eps: float) -> None:
        self.scale, self.approximate, self.eps = scale, approximate, eps

    @abstractmethod
    def measure(self, scores: Tensor, work: Tensor) -> Tensor:
        """The numbers [R, measures] to know of scores [R, n]. `work`, as large, is spoilt."""

    @abstractmethod
    def join(self, parts: Tensor) -> Tensor:
        """Those numbers of all tokens, from those [P, R, measures] of parts of them."""

    @abstractmethod
    def weigh(self, scores: Tensor, weights: Tensor, measured: Tensor | None = None) -> Stats:
        """Fill `weights` [R, n] from scores [R, n]; both may be the same tensor. `measured`: of all
        tokens, where these are some of them."""

    def backward(self, over: Pass) -> Tensor:
        """Returns the gradient of the scale, a number a row."""
        return self.end_backward(over, self.begin_backward(over))

    @abstractmethod
    def begin_backward(self, over: Pass) -> Tensor:
        """`backward` until it needs a sum [R, 1] over all tokens; returns it over these."""

    @abstractmethod
    def end_backward(self, over: Pass, along: Tensor) -> Tensor:
        """The rest of it, with that sum."""


class GeluOfNormed(Rule):
    """l2_gelu, W = gelu(f A) with f = sqrt(s) / (||A|| + eps), and what l1_gelu shares with it."""

    numbers = 2
    order = 2
    power = 0.5

    def __init__(self, scale: Scale, approximate: str, eps: float) -> None:
        super().__init__(scale, approximate, eps)
        self.root = scale**self.power

    def measure(self, scores: Tensor, work: Tensor) -> Tensor:
        return torch.linalg.vector_norm(scores, self.order, dim=-1, keepdim=True)

    def join(self, parts: Tensor) -> Tensor:
        return torch.linalg.vector_norm(parts, self.order, dim=0)

    def weigh(self, scores: Tensor, weights: Tensor, measured: Tensor | None = None) -> Stats:
        norm = self.measure(scores, weights) if measured is None else measured
        norm = zero_is_infinite(norm)
        factor = self.root / (norm + self.eps)
        gelu_(torch.mul(scores, factor, out=weights), self.approximate)
        return factor, norm

    def begin_backward(self, over: Pass) -> Tensor:
        scores, grad, weights, work, stats = over
        torch.mul(scores, stats[0], out=weights)
        gelu_backward_(grad, weights, self.approximate)
        gelu_(weights, self.approximate)
        return torch.mul(grad, scores, out=work).sum(1, keepdim=True)  # dL / df

    def end_backward(self, over: Pass, along: Tensor) -> Tensor:
        factor = over.stats[0]
        over.grad.mul_(factor)
        self.lengthen(over, along * factor**2 / self.root)
        return along * factor * (self.power / self.scale)

    def lengthen(self, over: Pass, shrink: Tensor) -> None:
        """Longer scores have a smaller factor: d||A|| / dA = A / ||A||."""
        over.grad.addcmul_(over.scores, shrink / over.stats[1], value=-1)


class L1Gelu(GeluOfNormed):
    """W = gelu(f A), f = s / (||A||_1 + eps)."""

    order = 1
    power = 1.0

    def lengthen(self, over: Pass, shrink: Tensor) -> None:
        over.grad.addcmul_(torch.sign(over.scores, out=over.work), shrink, value=-1)


class GeluL2(Rule):
    """W = f gelu(A), f = sqrt(s) / (||gelu(A)|| + eps)."""

    numbers = 2

    def measure(self, scores: Tensor, work: Tensor) -> Tensor:
        gelu(scores, work, self.approximate)
        return torch.linalg.vector_norm(work, dim=-1, keepdim=True)

    def join(self, parts: Tensor) -> Tensor:
        return torch.linalg.vector_norm(parts, dim=0)

    def weigh(self, scores: Tensor, weights: Tensor, measured: Tensor | None = None) -> Stats:
        if measured is None:
            measured = self.measure(scores, weights)
        else:
            gelu(scores, weights, self.approximate)
        norm = zero_is_infinite(measured)
        factor = self.scale**0.5 / (norm + self.eps)
        weights.mul_(factor)
        return factor, norm

    def begin_backward(self, over: Pass) -> Tensor:
        scores, grad, weights, work, _ = over
        gelu(scores, weights, self.approximate)
        return torch.mul(grad, weights, out=work).sum(1, keepdim=True)  # dL / df

    def end_backward(self, over: Pass, along: Tensor) -> Tensor:
        scores, grad, weights, _, (factor, norm) = over
        shrink = along * factor**2 / (self.scale**0.5 * norm)
        grad.mul_(factor).addcmul_(weights, shrink, value=-1)
        gelu_backward_(grad, scores, self.approximate)
        weights.mul_(factor)
        return along * factor / 2 / self.scale


class Softmax(Rule):
    """W = s exp(A) / sum exp(A). The largest score and the sum are kept apart: of large scores the
    logarithm of the sum has too few digits for shares that add up to one."""

    numbers = 2
    measures = 2

    def measure(self, scores: Tensor, work: Tensor) -> Tensor:
        if not scores.shape[-1]:
            return torch.cat([scores.new_full((len(scores), 1), v) for v in (-math.inf, 0.0)], 1)
        largest = scores.amax(-1, keepdim=True)
        total = torch.sub(scores, largest, out=work).exp_().sum(-1, keepdim=True)
        return torch.cat([largest, total], dim=1)

    def join(self, parts: Tensor) -> Tensor:
        tops, totals = parts.split(1, dim=-1)
        largest = tops.amax(0)
        return torch.cat([largest, ((tops - largest).exp() * totals).sum(0)], dim=-1)

    def weigh(self, scores: Tensor, weights: Tensor, measured: Tensor | None = None) -> Stats:
        if measured is None:
            largest, total = self.measure(scores, weights).split(1, dim=1)
        else:
            largest, total = measured.split(1, dim=1)
            torch.sub(scores, largest, out=weights).exp_()
        weights.mul_(self.scale / total)
        return largest, total

    def begin_backward(self, over: Pass) -> Tensor:
        scores, grad, weights, work, (largest, total) = over
        torch.sub(scores, largest, out=weights).exp_().div_(total)
        return torch.mul(grad, weights, out=work).sum(1, keepdim=True)

    def end_backward(self, over: Pass, along: Tensor) -> Tensor:
        over.weights.mul_(self.scale)
        over.grad.sub_(along).mul_(over.weights)
        return along


RULES: dict[str, type[Rule]] = {
    "l2_gelu": GeluOfNormed,
    "gelu_l2": GeluL2,
    "l1_gelu": L1Gelu,
    "softmax": Softmax,
}


def is_trained(*inputs: Scale) -> bool:
    """Whether a backward pass may follow."""
    learned = (isinstance(tensor, Tensor) and tensor.requires_grad for tensor in inputs)
    return torch.is_grad_enabled() and any(learned)


def cached_rows(matrix: Tensor) -> list[slice]:
    """The rows of a matrix, a few at a time; all at once where there is no such cache."""
    rows, row_bytes = matrix.shape[0], matrix.shape[1] * matrix.itemsize
    step = max(8, CACHED_BYTES // max(1, row_bytes)) if matrix.device.type == "cpu" else rows
    return [slice(start, min(rows, start + step)) for start in range(0, rows, max(1, step))]


def zero_is_infinite(norm: Tensor) -> Tensor:
    """As in `theta.py`: a zero row divided by its norm is zero."""
    wide = accumulation_dtype(norm.dtype)
    return norm.masked_fill(norm < math.sqrt(torch.finfo(wide).tiny), math.inf)


def gelu(inputs: Tensor, out: Tensor, approximate: str) -> None:
    torch.ops.aten.gelu.out(inputs, approximate=approximate, out=out)


def gelu_(inputs: Tensor, approximate: str) -> None:
    torch.ops.aten.gelu.out(inputs, approximate=approximate, out=inputs)


def gelu_backward_(grad: Tensor, inputs: Tensor, approximate: str) -> None:
    """`grad` of the output of GELU becomes that of its input."""
    torch.ops.aten.gelu_backward.grad_input(grad, inputs, approximate=approximate, grad_input=grad)


def product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """out = a b, of half precision rounded once."""
    return torch.mm(a, b, out=out) if out.dtype == a.dtype else out.copy_(a @ b)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b; of half precision the product is rounded, the sum is not."""
    if total.dtype == b.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a.to(b.dtype) @ b)


def row_products(a: Tensor, b: Tensor) -> Tensor:
    """Inner products of the rows, [R, 1]."""
    return torch.linalg.vecdot(a, b).unsqueeze(1)
