"""Pattention over chunks of tokens: nothing of size rows x tokens is ever stored.

For l2_gelu the norm is known before the scores: ||A||^2 = x^T G x with the Gram matrix G = K^T K.
So pattention is a plain GELU network on a rescaled input, y = f x,

    gelu(y K^T) V,      f = sqrt(s) / (sqrt(x^T G x) + eps)

and its backward pass is one pass over the tokens too: with dy from that network,

    dx = f dy + 2 c G x,    dK += 2 K (x^T diag(c) x),    c = dL/dq,  q = x^T G x

G squares the condition number, so it is formed in float64 and used as its Cholesky factor,
||A|| = ||R x|| with R^T R = G. Where there is no factor (keys that do not span all channels), with
float64 inputs, and with fewer rows than channels, the norms come from a pass over the scores.

gelu_l2 and softmax need no norm in advance: it is a factor on the output, accumulated over the
chunks, for softmax relative to the largest score so far. l1_gelu takes a second pass.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from tokenformer.ops.backends.derivatives import (
    add_product,
    cached_rows,
    gelu,
    gelu_,
    gelu_backward_,
    product,
    row_products,
)
from tokenformer.ops.backends.interface import Gradients, Kernel, Saved, SavedTensor, Sizes
from tokenformer.ops.theta import ThetaOptions, accumulation_dtype, zero_is_infinite

CHUNK_BYTES = 16 << 20
"""Size of a chunk of scores."""
FEWEST_TOKENS = 128
"""Fewer tokens per chunk make slow products."""
NEARLY_SINGULAR = 1e-5


class Chunks:
    """The tokens in chunks, with one buffer for the scores of every chunk."""

    def __init__(self, x: Tensor, keys: Tensor, values: Tensor, matrices: int) -> None:
        self.keys, self.values, self.rows = keys, values, x.shape[0]
        self.wide = accumulation_dtype(x.dtype)
        fitting = CHUNK_BYTES // (max(1, self.rows) * self.wide.itemsize)
        self.size = min(keys.shape[0], max(FEWEST_TOKENS, fitting))
        self.buffers = x.new_empty(matrices, self.rows * self.size, dtype=self.wide)

    def __iter__(self) -> Iterator[tuple[slice, Tensor, Tensor, list[Tensor]]]:
        """Yield a slice of tokens, their keys and values, and matrices [R, tokens] to write to."""
        for start in range(0, self.keys.shape[0], self.size):
            part = slice(start, min(self.keys.shape[0], start + self.size))
            shape = (self.rows, part.stop - part.start)
            matrices = [buffer[: shape[0] * shape[1]].view(shape) for buffer in self.buffers]
            yield part, self.keys[part], self.values[part], matrices


class L2Gelu(Kernel):
    """A GELU network on rows rescaled by the norm of their scores; `L1Gelu` differs in the norm."""

    order = 2

    def __init__(self, options: ThetaOptions) -> None:
        super().__init__(options)
        _, self.scale, self.approximate, self.eps = options
        self.root = self.scale**0.5 if self.order == 2 else self.scale

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, *, save: bool = True
    ) -> tuple[Tensor, Saved]:
        none = x.new_empty(0, 0, dtype=accumulation_dtype(x.dtype))
        root = gram_root(keys) if self.uses_gram(x.shape[0], x.shape[1], x.dtype) else none
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

    def uses_gram(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        return self.order == 2 and dtype != torch.float64 and rows >= width

    def saved_tensors(self, sizes: Sizes, dtype: torch.dtype) -> list[SavedTensor]:
        width = sizes.d_in if self.uses_gram(sizes.rows, sizes.d_in, dtype) else 0
        per_row = per_row_tensor(sizes, dtype)
        return [per_row, per_row, SavedTensor((width, width), accumulation_dtype(dtype))]

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

    def backward(
        self, grad: Tensor, x: Tensor, keys: Tensor, values: Tensor, saved: Saved
    ) -> Gradients:
        factor, norm, root = saved
        y = (x * factor).to(x.dtype)
        dy = torch.zeros_like(x, dtype=norm.dtype)
        by_gram = known(root)
        if not by_gram:
            slope = torch.zeros_like(dy)  # along the norm's gradient: K^T A, for L1 K^T sign(A)
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
        """The second pass of l1_gelu: the gradient of the keys through the norm."""
        scaled = (shrink * x).to(x.dtype)
        for part, some_keys, _, (scores,) in Chunks(x, keys, values, 1):
            product(x, some_keys.T, scores).sign_()
            dkeys[part].addmm_(scores.T.to(x.dtype), scaled, alpha=-1)


class L1Gelu(L2Gelu):
    order = 1


class GeluL2(Kernel):
    """The factor commutes with the values, so it is applied once, after all chunks."""

    def __init__(self, options: ThetaOptions) -> None:
        super().__init__(options)
        _, self.scale, self.approximate, self.eps = options

    def saved_tensors(self, sizes: Sizes, dtype: torch.dtype) -> list[SavedTensor]:
        per_row = per_row_tensor(sizes, dtype)
        return [per_row, per_row, output_tensor(sizes, dtype)]

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, *, save: bool = True
    ) -> tuple[Tensor, Saved]:
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

    def backward(
        self, grad: Tensor, x: Tensor, keys: Tensor, values: Tensor, saved: Saved
    ) -> Gradients:
        factor, norm, bare = saved
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


class Softmax(Kernel):
    """Sums relative to the largest score so far, as in flash attention."""

    def __init__(self, options: ThetaOptions) -> None:
        super().__init__(options)
        self.scale = options.scale

    def saved_tensors(self, sizes: Sizes, dtype: torch.dtype) -> list[SavedTensor]:
        return [per_row_tensor(sizes, dtype), output_tensor(sizes, dtype)]

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, *, save: bool = True
    ) -> tuple[Tensor, Saved]:
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

    def backward(
        self, grad: Tensor, x: Tensor, keys: Tensor, values: Tensor, saved: Saved
    ) -> Gradients:
        log_sum, out = saved
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
    """Return R [d, d] with R^T R = K^T K, or zeros if K^T K is nearly singular."""
    gram = keys.new_zeros(keys.shape[1], keys.shape[1], dtype=torch.float64)
    for some in keys.split(4096):
        double = some.double()
        gram.addmm_(double.T, double)
    root, failed = torch.linalg.cholesky_ex(gram, upper=True)
    # Where keys hardly span a direction, the factor and so the norms would be rounding errors.
    smallest, largest = root.diagonal().aminmax()
    if failed or smallest < NEARLY_SINGULAR * largest:
        root.zero_()
    return root.to(accumulation_dtype(keys.dtype)).contiguous()


def known(root: Tensor) -> bool:
    """Whether `gram_root` was called and found a factor."""
    return root.numel() > 0 and bool(root[0, 0] != 0)


def per_row_tensor(sizes: Sizes, dtype: torch.dtype) -> SavedTensor:
    return SavedTensor((sizes.rows, 1), accumulation_dtype(dtype))


def output_tensor(sizes: Sizes, dtype: torch.dtype) -> SavedTensor:
    return SavedTensor((sizes.rows, sizes.d_out), accumulation_dtype(dtype))


STREAMED: dict[str, type[Kernel]] = {
    "l2_gelu": L2Gelu,
    "gelu_l2": GeluL2,
    "l1_gelu": L1Gelu,
    "softmax": Softmax,
}


def make_streamed(options: ThetaOptions) -> Kernel:
    return STREAMED[options.theta](options)
