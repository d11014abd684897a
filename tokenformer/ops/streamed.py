"""Pattention over the tokens in chunks: nothing of the size rows x tokens is ever kept.

For l2_gelu the norm of the scores is known before they are: ||A||^2 = x^T G x with the Gram matrix
G = K^T K. So pattention is a plain GELU network on a rescaled input, y = f x,

    gelu(y K^T) V,      f = sqrt(s) / (sqrt(x^T G x) + eps)

and its backward pass is one pass over the tokens too: with dy from that network,

    dx = f dy + 2 c G x,    dK += 2 K (x^T diag(c) x),    c = dL/dq,  q = x^T G x

G squares the condition number, so it is formed in float64 and used as its Cholesky factor,
||A|| = ||R x|| with R^T R = G. Where there is none (keys that span less than all channels), where
inputs are float64 themselves, and where there are fewer rows than G has, the norms are taken from a
pass over the scores instead.

gelu_l2 and softmax need no norm in advance: theirs is a factor on the output, summed as the chunks
go by, for softmax relative to the largest score so far. l1_gelu takes a second pass.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tokenformer.ops.rules import (
    Grads,
    Kept,
    Scale,
    add_product,
    cached_rows,
    gelu,
    gelu_,
    gelu_backward_,
    product,
    row_products,
    zero_is_infinite,
)
from tokenformer.ops.theta import accumulation_dtype

CHUNK_BYTES = 16 << 20
"""Of a chunk of scores."""
FEWEST_TOKENS = 128
"""Fewer make slow products."""
NEARLY_SINGULAR = 1e-5


class Chunks:
    """The tokens in parts, with memory for their scores that is used again for every part."""

    def __init__(self, x: Tensor, keys: Tensor, values: Tensor, matrices: int) -> None:
        self.keys, self.values, self.rows = keys, values, x.shape[0]
        self.wide = accumulation_dtype(x.dtype)
        room = CHUNK_BYTES // (max(1, self.rows) * self.wide.itemsize)
        self.size = min(keys.shape[0], max(FEWEST_TOKENS, room))
        self.room = x.new_empty(matrices, self.rows * self.size, dtype=self.wide)

    def __iter__(self) -> Iterator[tuple[slice, Tensor, Tensor, list[Tensor]]]:
        """Which tokens, their keys and values, and matrices [R, tokens] to write to."""
        for start in range(0, self.keys.shape[0], self.size):
            part = slice(start, min(self.keys.shape[0], start + self.size))
            shape = (self.rows, part.stop - part.start)
            matrices = [room[: shape[0] * shape[1]].view(shape) for room in self.room]
            yield part, self.keys[part], self.values[part], matrices


class GeluNetwork:
    """l2_gelu and l1_gelu: a GELU network on rows rescaled by the norm of their scores."""

    def __init__(self, order: int, scale: Scale, approximate: str, eps: float) -> None:
        self.order, self.scale, self.approximate, self.eps = order, scale, approximate, eps
        self.root = scale**0.5 if order == 2 else scale

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, *, keep: bool = True
    ) -> tuple[Tensor, Kept]:
        none = x.new_empty(0, 0, dtype=accumulation_dtype(x.dtype))
        root = gram_root(keys) if self.uses_gram(x) else none
        norm = zero_is_infinite(self.norms(x, keys, values, root))
        factor = self.root / (norm + self.eps)  # [R, 1]
        y = (x * factor).to(x.dtype)
        out = norm.new_zeros(x.shape[0], values.shape[1])
        for _, some_keys, some_values, (weights,) in Chunks(x, keys, values, 1):
            product(y, some_keys.T, weights)
            for few in cached_rows(weights):
                gelu_(weights[few], self.approximate)
            add_product(out, weights, some_values)
        return out.to(x.dtype), (factor, norm, root)

    def uses_gram(self, x: Tensor) -> bool:
        return self.order == 2 and x.dtype != torch.float64 and x.shape[0] >= x.shape[1]

    def norms(self, x: Tensor, keys: Tensor, values: Tensor, root: Tensor) -> Tensor:
        """[R, 1]."""
        wide = accumulation_dtype(x.dtype)
        if known(root):
            return torch.linalg.vector_norm(x.to(wide) @ root.T, dim=1, keepdim=True)
        total = x.new_zeros(x.shape[0], 1, dtype=wide)
        for _, some_keys, _, (scores,) in Chunks(x, keys, values, 1):
            product(x, some_keys.T, scores)
            norm = torch.linalg.vector_norm(scores, self.order, dim=1, keepdim=True)
            total += norm**self.order
        return total if self.order == 1 else total.sqrt_()

    def backward(self, grad: Tensor, x: Tensor, keys: Tensor, values: Tensor, kept: Kept) -> Grads:
        factor, norm, root = kept
        y = (x * factor).to(x.dtype)
        dy = torch.zeros_like(x, dtype=norm.dtype)
        by_gram = known(root)
        if not by_gram:
            slope = torch.zeros_like(dy)  # where a row's norm grows: K^T A, or of L1 K^T sign(A)
        dkeys, dvalues = torch.empty_like(keys), torch.empty_like(values)
        for part, some_keys, some_values, matrices in Chunks(x, keys, values, 3):
            scores, weights, dscores = matrices
            product(y, some_keys.T, scores)
            product(grad, some_values.T, dscores)
            for few in cached_rows(scores):
                gelu(scores[few], weights[few], self.approximate)
                gelu_backward_(dscores[few], scores[few], self.approximate)
            add_product(dy, dscores, some_keys)
            torch.mm(dscores.T.to(x.dtype), y, out=dkeys[part])
            torch.mm(weights.T.to(x.dtype), grad, out=dvalues[part])
            if not by_gram:
                add_product(slope, scores if self.order == 2 else scores.sign_(), some_keys)
        along = row_products(x.to(norm.dtype), dy)  # dL / df
        shrink = along * factor**2 / self.root
        if self.order == 1:
            self.through_l1(dkeys, x, keys, values, shrink)
            dscale = (along * factor).sum() / self.scale
        else:
            shrink = shrink / norm
            if by_gram:
                slope = x.to(norm.dtype) @ root.T @ root
            else:
                slope /= factor.masked_fill(factor == 0, 1)
            dkeys.addmm_(keys, x.T @ (shrink * x).to(x.dtype), alpha=-1)
            dscale = (along * factor).sum() / 2 / self.scale
        return (factor * dy - shrink * slope).to(x.dtype), dkeys, dvalues, dscale

    def through_l1(
        self, dkeys: Tensor, x: Tensor, keys: Tensor, values: Tensor, shrink: Tensor
    ) -> None:
        """The second pass of l1_gelu: what the keys do to the norm."""
        scaled = (shrink * x).to(x.dtype)
        for part, some_keys, _, (scores,) in Chunks(x, keys, values, 1):
            product(x, some_keys.T, scores).sign_()
            dkeys[part].addmm_(scores.T.to(x.dtype), scaled, alpha=-1)


class GeluL2:
    """gelu_l2: the factor commutes with the values, so it waits until all chunks are seen."""

    def __init__(self, scale: Scale, approximate: str, eps: float) -> None:
        self.scale, self.approximate, self.eps = scale, approximate, eps

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, *, keep: bool = True
    ) -> tuple[Tensor, Kept]:
        wide = accumulation_dtype(x.dtype)
        squares = x.new_zeros(x.shape[0], 1, dtype=wide)
        bare = x.new_zeros(x.shape[0], values.shape[1], dtype=wide)
        for _, some_keys, some_values, (weights,) in Chunks(x, keys, values, 1):
            product(x, some_keys.T, weights)
            for few in cached_rows(weights):
                gelu_(weights[few], self.approximate)
                squares[few] += row_products(weights[few], weights[few])
            add_product(bare, weights, some_values)
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
        for part, some_keys, some_values, matrices in Chunks(x, keys, values, 3):
            scores, weights, dscores = matrices
            product(x, some_keys.T, scores)
            product(scaled, some_values.T, dscores)
            for few in cached_rows(scores):
                gelu(scores[few], weights[few], self.approximate)
                dscores[few].addcmul_(weights[few], shrink[few], value=-1)
                gelu_backward_(dscores[few], scores[few], self.approximate)
            add_product(dx, dscores, some_keys)
            torch.mm(dscores.T.to(x.dtype), x, out=dkeys[part])
            torch.mm(weights.T.to(x.dtype), scaled, out=dvalues[part])
        return dx.to(x.dtype), dkeys, dvalues, (along * factor).sum() / 2 / self.scale


class Softmax:
    """softmax: sums relative to the largest score so far, as in flash attention."""

    def __init__(self, scale: Scale, approximate: str, eps: float) -> None:
        self.scale = scale

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, *, keep: bool = True
    ) -> tuple[Tensor, Kept]:
        wide = accumulation_dtype(x.dtype)
        largest = x.new_full((x.shape[0], 1), -math.inf, dtype=wide)
        total = torch.zeros_like(largest)
        out = x.new_zeros(x.shape[0], values.shape[1], dtype=wide)
        for _, some_keys, some_values, (weights,) in Chunks(x, keys, values, 1):
            product(x, some_keys.T, weights)
            top = torch.maximum(largest, weights.amax(1, keepdim=True))
            kept_share = (largest - top).exp_()
            total.mul_(kept_share)
            for few in cached_rows(weights):
                weights[few].sub_(top[few]).exp_()
                total[few] += weights[few].sum(1, keepdim=True)
            out.mul_(kept_share)
            add_product(out, weights, some_values)
            largest = top
        out = out / total
        return (self.scale * out).to(x.dtype), (largest + total.log(), out)

    def backward(self, grad: Tensor, x: Tensor, keys: Tensor, values: Tensor, kept: Kept) -> Grads:
        log_sum, out = kept
        along = row_products(grad.to(out.dtype), out)
        level = self.scale * along
        dx = out.new_zeros(x.shape)
        dkeys, dvalues = torch.empty_like(keys), torch.empty_like(values)
        scaled = (self.scale * grad).to(x.dtype)
        for part, some_keys, some_values, (shares, dscores) in Chunks(x, keys, values, 2):
            product(x, some_keys.T, shares)
            product(scaled, some_values.T, dscores)
            for few in cached_rows(shares):
                shares[few].sub_(log_sum[few]).exp_()
                dscores[few].sub_(level[few]).mul_(shares[few])
            add_product(dx, dscores, some_keys)
            torch.mm(dscores.T.to(x.dtype), x, out=dkeys[part])
            torch.mm(shares.T.to(x.dtype), scaled, out=dvalues[part])
        return dx.to(x.dtype), dkeys, dvalues, along.sum()


def gram_root(keys: Tensor) -> Tensor:
    """R, [d, d], with R^T R = K^T K; zero where there is none."""
    gram = keys.new_zeros(keys.shape[1], keys.shape[1], dtype=torch.float64)
    for some in keys.split(4096):
        double = some.double()
        gram.addmm_(double.T, double)
    root, failed = torch.linalg.cholesky_ex(gram, upper=True)
    # Of keys that hardly span a direction the factor is rounding there, and so would be the norms.
    smallest, largest = root.diagonal().aminmax()
    if failed or smallest < NEARLY_SINGULAR * largest:
        root.zero_()
    return root.to(accumulation_dtype(keys.dtype)).contiguous()


def known(root: Tensor) -> bool:
    return root.numel() > 0 and bool(root[0, 0] != 0)


def streamed(theta: str, scale: Scale, approximate: str, eps: float) -> Any:
    """The kernel of a theta."""
    if theta in ("l2_gelu", "l1_gelu"):
        return GeluNetwork(2 if theta == "l2_gelu" else 1, scale, approximate, eps)
    return {"gelu_l2": GeluL2, "softmax": Softmax}[theta](scale, approximate, eps)
