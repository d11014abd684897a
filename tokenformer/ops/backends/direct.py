"""Pattention by plain matrix products that saves only the scores for the backward pass.

Products take many rows at a time. The elementwise passes between them take few, in memory that is
reused. Weights are recomputed from the scores in the backward pass. Where `native.fused` supports a
layer, all of it is one call of compiled code that does the same.

Many CPUs have no instructions for products in half precision, and torch is up to 70 times as slow
as in fp32 on them. Without a backward pass they are computed in fp32 there.
"""

import functools

import torch
from torch import Tensor

from tokenformer.ops.backends.derivatives import (
    DERIVATIVES,
    BackwardBlock,
    cached_rows,
    product,
    rows_per_product,
)
from tokenformer.ops.backends.interface import Gradients, Kernel, Saved, SavedTensor, Sizes
from tokenformer.ops.backends.native import fused
from tokenformer.ops.theta import ThetaOptions, accumulation_dtype


class Direct(Kernel):
    def __init__(self, options: ThetaOptions) -> None:
        super().__init__(options)
        self.theta = DERIVATIVES[options.theta](options)

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, *, save: bool = True
    ) -> tuple[Tensor, Saved]:
        """Saves the scores [R, n] and their row statistics [R, k]."""
        if not save and has_slow_products(x.device.type, x.dtype):
            wide_out, saved = self.forward(x.float(), keys.float(), values.float(), save=False)
            return wide_out.to(x.dtype), saved
        group = fused.TokenGroup(keys, values, self.options)
        if fused.supports(x, group):
            (out,), saved = fused.forward(x, [group], save=save)
            return out, saved
        rows, tokens, wide = x.shape[0], keys.shape[0], accumulation_dtype(x.dtype)
        out = x.new_empty(rows, values.shape[1])
        scores = x.new_empty(rows if save else 0, tokens)
        stats = x.new_empty(rows, self.theta.saved_per_row, dtype=wide)
        weights = x.new_empty(largest(x, keys), tokens, dtype=wide)
        for part in blocks(x, keys):
            some_rows, some_weights = x[part], weights[: len(x[part])]
            if save:
                block = torch.mm(some_rows, keys.T, out=scores[part]).to(wide)
            else:
                block = product(some_rows, keys.T, some_weights)
            for few in cached_rows(block):
                numbers = self.theta.fill_weights(block[few], some_weights[few])
                torch.cat(numbers, dim=1, out=stats[part][few])
            torch.mm(some_weights.to(x.dtype), values, out=out[part])
        return out, (scores, stats)

    def backward(
        self, grad: Tensor, x: Tensor, keys: Tensor, values: Tensor, saved: Saved
    ) -> Gradients:
        group = fused.TokenGroup(keys, values, self.options)
        if fused.supports(x, group):
            dx, (gradients,) = fused.backward([grad], x, [group], saved)
            return dx, *gradients
        scores, stats = saved
        dx, dkeys, dvalues = (torch.empty_like(tensor) for tensor in (x, keys, values))
        dscale = stats.new_zeros(())
        buffers = [stats.new_empty(largest(x, keys), keys.shape[0]) for _ in range(2)]
        for part in blocks(x, keys):
            block = scores[part].to(stats.dtype)
            weights, dblock = (buffer[: len(block)] for buffer in buffers)
            product(grad[part], values.T, dblock)
            dscale += self.backward_in_cache(block, dblock, weights, stats[part])
            dscores = dblock.to(x.dtype)
            torch.mm(dscores, keys, out=dx[part])
            # beta=0 on the first block saves zeroing the memory in a pass of its own.
            beta = 0 if part.start == 0 else 1
            torch.addmm(dkeys, dscores.T, x[part], beta=beta, out=dkeys)
            torch.addmm(dvalues, weights.to(x.dtype).T, grad[part], beta=beta, out=dvalues)
        if not len(x):
            dkeys.zero_()
            dvalues.zero_()
        return dx, dkeys, dvalues, dscale

    def backward_in_cache(
        self, scores: Tensor, grad: Tensor, weights: Tensor, stats: Tensor
    ) -> Tensor:
        """The derivative of theta, over rows that fit into a core's cache."""
        pieces = cached_rows(scores)
        scratch = torch.empty_like(scores[pieces[0]])
        total = stats.new_zeros(())
        for few in pieces:
            numbers = stats[few].split(1, dim=1)
            total += self.theta.backward(
                BackwardBlock(
                    scores[few], grad[few], weights[few], scratch[: len(scores[few])], numbers
                )
            ).sum()
        return total

    def saved_tensors(self, sizes: Sizes, dtype: torch.dtype) -> list[SavedTensor]:
        stats = (sizes.rows, self.theta.saved_per_row)
        return [
            SavedTensor((sizes.rows, sizes.tokens), dtype),
            SavedTensor(stats, accumulation_dtype(dtype)),
        ]


@functools.cache
def has_slow_products(device: str, dtype: torch.dtype) -> bool:
    """Whether products in this dtype are faster in fp32, conversion included."""
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    check = getattr(torch.ops.mkldnn, f"_is_mkldnn_{names.get(dtype)}_supported", None)
    return device == "cpu" and check is not None and not check()


def largest(x: Tensor, keys: Tensor) -> int:
    return max((part.stop - part.start for part in blocks(x, keys)), default=0)


def blocks(x: Tensor, keys: Tensor) -> list[slice]:
    """Blocks of rows. One block on a GPU, which hides memory latency by itself, and in half
    precision, where summing over blocks would round each time."""
    rows = x.shape[0]
    step = rows_per_product(keys.shape[0])
    if x.device.type != "cpu" or x.dtype.itemsize < 4:
        step = max(1, rows)
    return [slice(start, min(rows, start + step)) for start in range(0, rows, step)]
