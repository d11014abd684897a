"""The thetas by hand: weights from scores, and back, on blocks of rows that the cache holds.

What autograd would do with `theta.py`, written out so that nothing but the scores and one or two
numbers a row need be kept for the backward pass. Whatever is computed here is in fp32 or wider.

    stats = rule.stats(A)               a number or two a row, [R, 1] each
    W = rule.weights(A, stats)          [R, n]
    dA, ds = rule.backward(A, dW, stats)
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer.ops.theta import accumulation_dtype

Stats = tuple[Tensor, ...]
Scale = float | Tensor
Kept = tuple[Tensor, ...]
"""What a backward pass needs besides the inputs."""
Grads = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of rows, keys, values and scale."""


class Rule(Protocol):
    def stats(self, scores: Tensor) -> Stats: ...

    def weights(self, scores: Tensor, stats: Stats) -> Tensor: ...

    def backward(self, scores: Tensor, grad: Tensor, stats: Stats) -> tuple[Tensor, Tensor]:
        """Gradients of the scores [R, n], and of the scale, a number a row [R, 1]; `grad` is that
        of the weights, and may be overwritten."""
        ...


@dataclass(frozen=True)
class L2Gelu:
    """W = gelu(f A), f = sqrt(s) / (||A|| + eps)."""

    scale: Scale
    approximate: str
    eps: float

    def stats(self, scores: Tensor) -> Stats:
        norm = zero_is_infinite(torch.linalg.vector_norm(scores, dim=-1, keepdim=True))
        return self.scale**0.5 / (norm + self.eps), norm

    def weights(self, scores: Tensor, stats: Stats) -> Tensor:
        return F.gelu(scores * stats[0], approximate=self.approximate)

    def backward(self, scores: Tensor, grad: Tensor, stats: Stats) -> tuple[Tensor, Tensor]:
        factor, norm = stats
        inner = gelu_backward(grad, scores * factor, self.approximate)
        along = row_products(inner, scores)  # dL / df
        # df / dA = -f^2 / sqrt(s) A / ||A||
        shrink = along * factor**2 / (self.scale**0.5 * norm)
        return inner.mul_(factor).addcmul_(
            scores, shrink, value=-1
        ), along * factor / 2 / self.scale


@dataclass(frozen=True)
class GeluL2:
    """W = f gelu(A), f = sqrt(s) / (||gelu(A)|| + eps)."""

    scale: Scale
    approximate: str
    eps: float

    def stats(self, scores: Tensor) -> Stats:
        bare = F.gelu(scores, approximate=self.approximate)
        norm = zero_is_infinite(torch.linalg.vector_norm(bare, dim=-1, keepdim=True))
        return self.scale**0.5 / (norm + self.eps), norm

    def weights(self, scores: Tensor, stats: Stats) -> Tensor:
        return F.gelu(scores, approximate=self.approximate).mul_(stats[0])

    def backward(self, scores: Tensor, grad: Tensor, stats: Stats) -> tuple[Tensor, Tensor]:
        factor, norm = stats
        bare = F.gelu(scores, approximate=self.approximate)
        along = row_products(grad, bare)
        shrink = along * factor**2 / (self.scale**0.5 * norm)
        outer = (grad * factor).addcmul_(bare, shrink, value=-1)
        return gelu_backward(outer, scores, self.approximate), along * factor / 2 / self.scale


@dataclass(frozen=True)
class L1Gelu:
    """W = gelu(f A), f = s / (||A||_1 + eps)."""

    scale: Scale
    approximate: str
    eps: float

    def stats(self, scores: Tensor) -> Stats:
        norm = torch.linalg.vector_norm(scores, ord=1, dim=-1, keepdim=True)
        return (self.scale / (zero_is_infinite(norm) + self.eps),)

    def weights(self, scores: Tensor, stats: Stats) -> Tensor:
        return F.gelu(scores * stats[0], approximate=self.approximate)

    def backward(self, scores: Tensor, grad: Tensor, stats: Stats) -> tuple[Tensor, Tensor]:
        (factor,) = stats
        inner = gelu_backward(grad, scores * factor, self.approximate)
        along = row_products(inner, scores)
        shrink = along * factor**2 / self.scale
        return inner.mul_(factor).addcmul_(
            scores.sign(), shrink, value=-1
        ), along * factor / self.scale


@dataclass(frozen=True)
class Softmax:
    """W = s exp(A) / sum exp(A)."""

    scale: Scale
    approximate: str
    eps: float

    def stats(self, scores: Tensor) -> Stats:
        return (scores.logsumexp(-1, keepdim=True),)

    def weights(self, scores: Tensor, stats: Stats) -> Tensor:
        return (scores - stats[0]).exp_().mul_(self.scale)

    def backward(self, scores: Tensor, grad: Tensor, stats: Stats) -> tuple[Tensor, Tensor]:
        shares = (scores - stats[0]).exp_()
        along = row_products(shares, grad)
        return (grad - along).mul_(shares).mul_(self.scale), along


RULES: dict[str, type[L2Gelu] | type[GeluL2] | type[L1Gelu] | type[Softmax]] = {
    "l2_gelu": L2Gelu,
    "gelu_l2": GeluL2,
    "l1_gelu": L1Gelu,
    "softmax": Softmax,
}


def zero_is_infinite(norm: Tensor) -> Tensor:
    """As in `theta.py`: a zero row divided by its norm is zero."""
    wide = accumulation_dtype(norm.dtype)
    return norm.masked_fill(norm < math.sqrt(torch.finfo(wide).tiny), math.inf)


def gelu_backward(grad: Tensor, inputs: Tensor, approximate: str) -> Tensor:
    return torch.ops.aten.gelu_backward(grad, inputs, approximate=approximate)


def row_products(a: Tensor, b: Tensor) -> Tensor:
    """Inner products of the rows, [R, 1], without a product of the size of the factors."""
    return torch.bmm(a.unsqueeze(1), b.unsqueeze(2)).squeeze(2)
