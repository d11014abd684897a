"""The thetas by hand: weights from scores, and back, in memory that is there already.

What autograd would do with `theta.py`, written out so that nothing but the scores and one or two
numbers a row need be kept for the backward pass. Whatever is computed here is in fp32 or wider, on
a few rows at a time, which a core's cache holds: the passes then cost little beside the products.
"""

import math
from typing import Protocol

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


class Rule(Protocol):
    numbers: int
    """How many statistics there are."""

    def __init__(self, scale: Scale, approximate: str, eps: float) -> None: ...

    def weigh(self, scores: Tensor, weights: Tensor) -> Stats:
        """Fill `weights` [R, n] from scores [R, n]; both may be the same tensor."""
        ...

    def backward(
        self, scores: Tensor, grad: Tensor, weights: Tensor, work: Tensor, stats: Stats
    ) -> Tensor:
        """Turn `grad` from that of the weights into that of the scores, and fill `weights` with the
        weights again. Returns the gradient of the scale, a number a row. `work` is spoilt."""
        ...


class GeluOfNormed:
    """l2_gelu, W = gelu(f A) with f = sqrt(s) / (||A|| + eps), and what l1_gelu shares with it."""

    numbers = 2
    order = 2
    power = 0.5

    def __init__(self, scale: Scale, approximate: str, eps: float) -> None:
        self.scale, self.approximate, self.eps = scale, approximate, eps
        self.root = scale**self.power

    def weigh(self, scores: Tensor, weights: Tensor) -> Stats:
        norm = torch.linalg.vector_norm(scores, self.order, dim=-1, keepdim=True)
        norm = zero_is_infinite(norm)
        factor = self.root / (norm + self.eps)
        gelu_(torch.mul(scores, factor, out=weights), self.approximate)
        return factor, norm

    def backward(
        self, scores: Tensor, grad: Tensor, weights: Tensor, work: Tensor, stats: Stats
    ) -> Tensor:
        factor, norm = stats
        torch.mul(scores, factor, out=weights)
        gelu_backward_(grad, weights, self.approximate)
        gelu_(weights, self.approximate)
        along = torch.mul(grad, scores, out=work).sum(1, keepdim=True)  # dL / df
        shrink = along * factor**2 / self.root
        grad.mul_(factor)
        self.lengthen(scores, grad, shrink, norm, work)
        return along * factor * (self.power / self.scale)

    def lengthen(
        self, scores: Tensor, grad: Tensor, shrink: Tensor, norm: Tensor, work: Tensor
    ) -> None:
        """Longer scores have a smaller factor: d||A|| / dA = A / ||A||."""
        grad.addcmul_(scores, shrink / norm, value=-1)


class L1Gelu(GeluOfNormed):
    """W = gelu(f A), f = s / (||A||_1 + eps)."""

    order = 1
    power = 1.0

    def lengthen(
        self, scores: Tensor, grad: Tensor, shrink: Tensor, norm: Tensor, work: Tensor
    ) -> None:
        grad.addcmul_(torch.sign(scores, out=work), shrink, value=-1)


class GeluL2:
    """W = f gelu(A), f = sqrt(s) / (||gelu(A)|| + eps)."""

    numbers = 2

    def __init__(self, scale: Scale, approximate: str, eps: float) -> None:
        self.scale, self.approximate, self.eps = scale, approximate, eps

    def weigh(self, scores: Tensor, weights: Tensor) -> Stats:
        gelu(scores, weights, self.approximate)
        norm = zero_is_infinite(torch.linalg.vector_norm(weights, dim=-1, keepdim=True))
        factor = self.scale**0.5 / (norm + self.eps)
        weights.mul_(factor)
        return factor, norm

    def backward(
        self, scores: Tensor, grad: Tensor, weights: Tensor, work: Tensor, stats: Stats
    ) -> Tensor:
        factor, norm = stats
        gelu(scores, weights, self.approximate)
        along = torch.mul(grad, weights, out=work).sum(1, keepdim=True)  # dL / df
        shrink = along * factor**2 / (self.scale**0.5 * norm)
        grad.mul_(factor).addcmul_(weights, shrink, value=-1)
        gelu_backward_(grad, scores, self.approximate)
        weights.mul_(factor)
        return along * factor / 2 / self.scale


class Softmax:
    """W = s exp(A) / sum exp(A). The largest score and the sum are kept apart: of large scores the
    logarithm of the sum has too few digits for shares that add up to one."""

    numbers = 2

    def __init__(self, scale: Scale, approximate: str, eps: float) -> None:
        self.scale = scale

    def weigh(self, scores: Tensor, weights: Tensor) -> Stats:
        largest = scores.amax(-1, keepdim=True)
        total = torch.sub(scores, largest, out=weights).exp_().sum(-1, keepdim=True)
        weights.mul_(self.scale / total)
        return largest, total

    def backward(
        self, scores: Tensor, grad: Tensor, weights: Tensor, work: Tensor, stats: Stats
    ) -> Tensor:
        largest, total = stats
        torch.sub(scores, largest, out=weights).exp_().div_(total)
        along = torch.mul(grad, weights, out=work).sum(1, keepdim=True)
        weights.mul_(self.scale)
        grad.sub_(along).mul_(weights)
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
