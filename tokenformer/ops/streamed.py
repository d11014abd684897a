"""Pattention over the tokens in chunks: nothing of the size rows x tokens is ever kept.

For l2_gelu the norm of the scores is known before they are: ||A||^2 = x^T G x with the Gram matrix
G = K^T K. So pattention is a plain GELU network on a rescaled input, y = f x,

    gelu(y K^T) V,      f = sqrt(s) / (sqrt(x^T G x) + eps)

and its backward pass is one pass over the tokens too: with dy from that network,

    dx = f dy + 2 c G x,    dK += 2 K (x^T diag(c) x),    c = dL/dq,  q = x^T G x

G squares the condition number, so it is formed in float64. Inputs that are float64 themselves, and
batches with fewer rows than G has, get their norms from a pass over the scores instead.

gelu_l2 and softmax need no norm in advance: theirs is a factor on the output, summed as the chunks
go by, for softmax relative to the largest score so far. l1_gelu takes a second pass.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer.ops.rules import (
    Grads,
    Kept,
    Scale,
    gelu_backward,
    row_products,
    zero_is_infinite,
)
from tokenformer.ops.theta import accumulation_dtype

CHUNK_BYTES = 8 << 20
"""Of a chunk of scores."""
FEWEST_TOKENS = 128
"""Fewer make slow products."""


def chunks(keys: Tensor, values: Tensor, rows: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    wide = accumulation_dtype(keys.dtype)
    size = max(FEWEST_TOKENS, CHUNK_BYTES // (max(rows, 1) * wide.itemsize))
    for start in range(0, keys.shape[0], size):
        part = slice(start, start + size)
        yield part, keys[part], values[part]


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b; of half precision the product is rounded, the sum is not."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


class GeluNetwork:
    """l2_gelu and l1_gelu: a GELU network on rows rescaled by the norm of their scores."""

    def __init__(self, order: int, scale: Scale, approximate: str, eps: float) -> None:
        self.order, self.scale, self.approximate, self.eps = order, scale, approximate, eps

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Kept]:
        norm = zero_is_infinite(self.norms(x, keys, values))
        top = self.scale**0.5 if self.order == 2 else self.scale
        factor = top / (norm + self.eps)  # [R, 1]
        y = (x * factor).to(x.dtype)
        out = norm.new_zeros(x.shape[0], values.shape[1])
        for _, some_keys, some_values in chunks(keys, values, len(x)):
            scores = (y @ some_keys.T).to(norm.dtype)
            add_product(out, F.gelu(scores, approximate=self.approximate).to(x.dtype), some_values)
        return out.to(x.dtype), (factor, norm)

    def norms(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[R, 1]."""
        wide = accumulation_dtype(x.dtype)
        if self.uses_gram(x):
            double = x.double()
            return row_products(double @ gram(keys), double).clamp_(min=0).sqrt_().to(wide)
        total = x.new_zeros(x.shape[0], 1, dtype=wide)
        for _, some_keys, _ in chunks(keys, values, len(x)):
            scores = (x @ some_keys.T).to(wide)
            total += torch.linalg.vector_norm(scores, self.order, 1, keepdim=True) ** self.order
        return total if self.order == 1 else total.sqrt_()

    def uses_gram(self, x: Tensor) -> bool:
        return self.order == 2 and x.dtype != torch.float64 and x.shape[0] >= x.shape[1]

    def backward(self, grad: Tensor, x: Tensor, keys: Tensor, values: Tensor, kept: Kept) -> Grads:
        factor, norm = kept
        y = (x * factor).to(x.dtype)
        dy, slope = torch.zeros_like(x, dtype=norm.dtype), torch.zeros_like(x, dtype=norm.dtype)
        dkeys, dvalues = torch.empty_like(keys), torch.empty_like(values)
        exact = not self.uses_gram(x)
        for part, some_keys, some_values in chunks(keys, values, len(x)):
            scores = (y @ some_keys.T).to(norm.dtype)
            weights = F.gelu(scores, approximate=self.approximate).to(x.dtype)
            torch.mm(weights.T, grad, out=dvalues[part])
            dweights = (grad @ some_values.T).to(norm.dtype)
            dscores = gelu_backward(dweights, scores, self.approximate).to(x.dtype)
            torch.mm(dscores.T, y, out=dkeys[part])
            add_product(dy, dscores, some_keys)
            if exact:  # where the norm grows: K^T A, of L1 K^T sign(A)
                outward = scores if self.order == 2 else scores.sign_()
                add_product(slope, outward.to(x.dtype), some_keys)
        along = row_products(x.to(norm.dtype), dy)  # dL / df
        if self.order == 1:
            shrink = along * factor**2 / self.scale
            self.through_l1(dkeys, x, keys, values, shrink)
            return self.grads(factor * dy - shrink * slope, dkeys, dvalues, along * factor)
        shrink = along * factor**2 / (self.scale**0.5 * norm)
        if exact:
            slope = slope / factor.masked_fill(factor == 0, 1)
        else:
            slope = (x.double() @ gram(keys)).to(norm.dtype)
        inner = x.T @ (shrink * x).to(x.dtype)  # [d, d]
        dkeys.addmm_(keys, inner, alpha=-1)
        return self.grads(factor * dy - shrink * slope, dkeys, dvalues, along * factor / 2)

    def through_l1(
        self, dkeys: Tensor, x: Tensor, keys: Tensor, values: Tensor, shrink: Tensor
    ) -> None:
        """The second pass of l1_gelu: what the keys do to the norm."""
        scaled = (shrink * x).to(x.dtype)
        for part, some_keys, _ in chunks(keys, values, len(x)):
            dkeys[part].addmm_((x @ some_keys.T).sign_().T, scaled, alpha=-1)

    def grads(self, dx: Tensor, dkeys: Tensor, dvalues: Tensor, along: Tensor) -> Grads:
        """`along`: dL / d log(s) of every row."""
        return dx.to(dkeys.dtype), dkeys, dvalues, along.sum() / self.scale


class GeluL2:
    """gelu_l2: the factor commutes with the values, so it waits until all chunks are seen."""

    def __init__(self, scale: Scale, approximate: str, eps: float) -> None:
        self.scale, self.approximate, self.eps = scale, approximate, eps

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Kept]:
        wide = accumulation_dtype(x.dtype)
        squares = x.new_zeros(x.shape[0], 1, dtype=wide)
        bare = x.new_zeros(x.shape[0], values.shape[1], dtype=wide)
        for _, some_keys, some_values in chunks(keys, values, len(x)):
            scores = (x @ some_keys.T).to(wide)
            weights = F.gelu(scores, approximate=self.approximate)
            squares += row_products(weights, weights)
            add_product(bare, weights.to(x.dtype), some_values)
        norm = zero_is_infinite(squares.sqrt_())
        factor = self.scale**0.5 / (norm + self.eps)
        return (factor * bare).to(x.dtype), (factor, norm, bare)

    def backward(self, grad: Tensor, x: Tensor, keys: Tensor, values: Tensor, kept: Kept) -> Grads:
        factor, norm, bare = kept
        along = row_products(grad.to(norm.dtype), bare)  # dL / df
        shrink = along * factor**2 / (self.scale**0.5 * norm)
        scaled = (factor * grad).to(x.dtype)
        dx = bare.new_zeros(x.shape)
        dkeys, dvalues = torch.empty_like(keys), torch.empty_like(values)
        for part, some_keys, some_values in chunks(keys, values, len(x)):
            scores = (x @ some_keys.T).to(norm.dtype)
            weights = F.gelu(scores, approximate=self.approximate)
            torch.mm(weights.to(x.dtype).T, scaled, out=dvalues[part])
            dweights = (scaled @ some_values.T).to(norm.dtype)
            dweights = dweights.addcmul_(weights, shrink, value=-1)
            dscores = gelu_backward(dweights, scores, self.approximate).to(x.dtype)
            torch.mm(dscores.T, x, out=dkeys[part])
            add_product(dx, dscores, some_keys)
        return dx.to(x.dtype), dkeys, dvalues, (along * factor).sum() / 2 / self.scale


class Softmax:
    """softmax: sums relative to the largest score so far, as in flash attention."""

    def __init__(self, scale: Scale, approximate: str, eps: float) -> None:
        self.scale = scale

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Kept]:
        wide = accumulation_dtype(x.dtype)
        largest = x.new_full((x.shape[0], 1), -math.inf, dtype=wide)
        total = torch.zeros_like(largest)
        out = x.new_zeros(x.shape[0], values.shape[1], dtype=wide)
        for _, some_keys, some_values in chunks(keys, values, len(x)):
            scores = (x @ some_keys.T).to(wide)
            top = torch.maximum(largest, scores.amax(1, keepdim=True))
            weights = scores.sub_(top).exp_()
            kept_share = (largest - top).exp_()
            total.mul_(kept_share).add_(weights.sum(1, keepdim=True))
            out.mul_(kept_share)
            add_product(out, weights.to(x.dtype), some_values)
            largest = top
        out = out / total
        return (self.scale * out).to(x.dtype), (largest + total.log(), out)

    def backward(self, grad: Tensor, x: Tensor, keys: Tensor, values: Tensor, kept: Kept) -> Grads:
        log_sum, out = kept
        along = row_products(grad.to(out.dtype), out)
        dx = out.new_zeros(x.shape)
        dkeys, dvalues = torch.empty_like(keys), torch.empty_like(values)
        scaled = (self.scale * grad).to(x.dtype)
        for part, some_keys, some_values in chunks(keys, values, len(x)):
            shares = (x @ some_keys.T).to(out.dtype).sub_(log_sum).exp_()
            torch.mm(shares.to(x.dtype).T, scaled, out=dvalues[part])
            dweights = (scaled @ some_values.T).to(out.dtype)
            dscores = dweights.sub_(self.scale * along).mul_(shares).to(x.dtype)
            torch.mm(dscores.T, x, out=dkeys[part])
            add_product(dx, dscores, some_keys)
        return dx.to(x.dtype), dkeys, dvalues, along.sum()


def gram(keys: Tensor) -> Tensor:
    """K^T K in float64, [d, d]."""
    double = keys.double()
    return double.T @ double


def streamed(theta: str, scale: Scale, approximate: str, eps: float) -> Any:
    """The kernel of a theta."""
    if theta in ("l2_gelu", "l1_gelu"):
        return GeluNetwork(2 if theta == "l2_gelu" else 1, scale, approximate, eps)
    return {"gelu_l2": GeluL2, "softmax": Softmax}[theta](scale, approximate, eps)
