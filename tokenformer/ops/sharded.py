"""Tensor-parallel pattention: every process holds a shard of the tokens.

All processes have the same rows. Theta needs one number over all scores of a row, its norm (softmax
needs two, the largest score and the sum); it is exchanged in fp32 or wider. Then each process
weighs its own values and the outputs are summed. The backward pass exchanges one number per row and
sums the gradients of the rows.

The norm of l2_gelu could come from the Gram matrix of all keys instead, summed once per step. That
exchanges d^2 numbers and costs products of its own; docs/results/performance.md compares both.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenformer.ops.backends.autograd import KernelFunction, autocast
from tokenformer.ops.backends.derivatives import DERIVATIVES, BackwardBlock, cached_rows, product
from tokenformer.ops.backends.interface import Gradients, Kernel, Saved, SavedTensor, Sizes
from tokenformer.ops.theta import ThetaOptions, accumulation_dtype

Group = Any
"""A process group of torch.distributed."""


@torch.compiler.disable  # collectives break the graph
def sharded_pattention(
    x: Tensor,
    key_tokens: Tensor,
    value_tokens: Tensor,
    group: Group,
    *,
    scale_tokens: float | Tensor,
    theta: str = "l2_gelu",
    approximate: str = "none",
    eps: float = 0.0,
    sum_gradient: bool = True,
) -> Tensor:
    """`pattention` over the tokens of all processes in `group`; `key_tokens` and `value_tokens` are
    this process's shard.

    Collective, and so is the backward pass. `x` and the scale must be the same on every process;
    then so are the output and their gradients. Each process gets the gradients of its own tokens.
    With `sum_gradient=False` the gradient of `x` is this process's part, for the caller to sum.
    """
    x, keys, values = autocast(x, key_tokens, value_tokens)
    scale = scale_tokens.reshape(()) if isinstance(scale_tokens, Tensor) else scale_tokens
    rows = x.reshape(-1, x.shape[-1])
    make = partial(Sharded, group, sum_gradient)
    out = FirstOrder.apply(rows, keys, values, scale, make, (theta, approximate, eps))
    return out.reshape(*x.shape[:-1], values.shape[1])


class FirstOrder(KernelFunction):
    """Refuses second derivatives, which `KernelFunction` computes for a single process."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_graph()
        return KernelFunction.backward(ctx, grad)


class Sharded(Kernel):
    """Like `Direct`, with row statistics and outputs exchanged between processes."""

    def __init__(self, group: Group, sum_gradient: bool, options: ThetaOptions) -> None:
        super().__init__(options)
        self.group, self.sum_gradient = group, sum_gradient
        self.theta = DERIVATIVES[options.theta](options)

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, *, save: bool = True
    ) -> tuple[Tensor, Saved]:
        """Saves the scores [R, n] of this process's tokens and their row statistics [R, k]."""
        scores = x @ keys.T
        block = scores.to(accumulation_dtype(x.dtype))
        weights = torch.empty_like(block)
        mine = block.new_empty(len(block), self.theta.statistics_per_row)
        for few in cached_rows(block):
            mine[few] = self.theta.row_statistics(block[few], weights[few])
        combined = self.theta.combine(all_gather(mine, self.group))
        stats = block.new_empty(len(block), self.theta.saved_per_row)
        for few in cached_rows(block):
            numbers = self.theta.fill_weights(block[few], weights[few], combined[few])
            torch.cat(numbers, dim=1, out=stats[few])
        out = weights.to(x.dtype) @ values
        dist.all_reduce(out, group=self.group)
        return out, (scores, stats)

    def backward(
        self, grad: Tensor, x: Tensor, keys: Tensor, values: Tensor, saved: Saved
    ) -> Gradients:
        scores, stats = saved
        block = scores.to(stats.dtype)
        weights, dblock = torch.empty_like(block), torch.empty_like(block)
        product(grad, values.T, dblock)

        def block_of(few: slice) -> BackwardBlock:
            scratch = torch.empty_like(block[few])
            numbers = stats[few].split(1, dim=1)
            return BackwardBlock(block[few], dblock[few], weights[few], scratch, numbers)

        sums, dscale = stats.new_empty(len(block), 1), stats.new_zeros(())
        for few in cached_rows(block):
            sums[few] = self.theta.backward_sums(block_of(few))
        dist.all_reduce(sums, group=self.group)
        for few in cached_rows(block):
            dscale += self.theta.backward_scores(block_of(few), sums[few]).sum()
        dscores = dblock.to(x.dtype)
        dx = dscores @ keys
        summed = dist.all_reduce(dx, group=self.group, async_op=True) if self.sum_gradient else None
        dkeys, dvalues = dscores.T @ x, weights.to(x.dtype).T @ grad  # overlaps with the sum
        if summed is not None:
            summed.wait()
        return dx, dkeys, dvalues, dscale

    def saved_tensors(self, sizes: Sizes, dtype: torch.dtype) -> list[SavedTensor]:
        stats = (sizes.rows, self.theta.saved_per_row)
        return [
            SavedTensor((sizes.rows, sizes.tokens), dtype),
            SavedTensor(stats, accumulation_dtype(dtype)),
        ]


def all_gather(mine: Tensor, group: Group) -> Tensor:
    """[R, k] of each process -> [P, R, k]."""
    found = mine.new_empty(dist.get_world_size(group), *mine.shape)
    dist.all_gather([*found], mine, group=group)
    return found


class SumGradient(torch.autograd.Function):
    """The identity, whose gradient is summed over a group: for rows shared by several calls with
    `sum_gradient=False`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        refuse_graph()
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def refuse_graph() -> None:
    if torch.is_grad_enabled():  # in a backward pass: with create_graph
        raise NotImplementedError(
            "tensor-parallel pattention has no second derivatives; use one process for create_graph"
        )
