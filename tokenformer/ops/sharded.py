"""Pattention whose tokens are spread over several processes, each of which has some of them.

All have the same rows. What theta must know of all scores of a row is one number, its norm (of
softmax two, the largest score and the sum): it is exchanged in fp32 or wider. Then each weighs its
own values and the outputs are summed. The backward pass exchanges one number a row and sums the
gradients of the rows.

The norm of l2_gelu could be had from the Gram matrix of all keys instead, summed once a step. That
is d^2 numbers and products of their own; docs/performance.md has both measured.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenformer.ops.kernel import ByHand, autocast
from tokenformer.ops.rules import RULES, Grads, Kept, Pass, Scale, cached_rows, product
from tokenformer.ops.theta import accumulation_dtype

Group = Any
"""A process group of torch.distributed."""


@torch.compiler.disable  # compiled code calls it between its graphs
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
    """`pattention` with the tokens of all processes in `group`, of which these are this one's.

    Collective, and so is its backward pass. `x` and the scale must be the same on every process;
    the output and the gradients of both then are. Each process gets the gradients of its own
    tokens. Without `sum_gradient` that of `x` is this process's part, for the caller to sum.
    """
    x, keys, values = autocast(x, key_tokens, value_tokens)
    scale = scale_tokens.reshape(()) if isinstance(scale_tokens, Tensor) else scale_tokens
    rows = x.reshape(-1, x.shape[-1])
    make = partial(Sharded, group, sum_gradient)
    out = Once.apply(rows, keys, values, scale, make, (theta, approximate, eps))
    return out.reshape(*x.shape[:-1], values.shape[1])


class Once(ByHand):
    """Without gradients of gradients: those would come from the formula for one process."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_graph()
        return ByHand.backward(ctx, grad)


class Sharded:
    """One theta, as a kernel (`kernel.py`); the passes are those of `direct`."""

    def __init__(
        self,
        group: Group,
        sum_gradient: bool,
        theta: str,
        scale: Scale,
        approximate: str,
        eps: float,
    ) -> None:
        self.group, self.sum_gradient = group, sum_gradient
        self.rule = RULES[theta](scale, approximate, eps)

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, *, keep: bool = True
    ) -> tuple[Tensor, Kept]:
        """Rows [R, d_in] -> [R, d_out]; kept are the scores [R, n] and their statistics [R, k], n
        being the number of this process's tokens."""
        scores = x @ keys.T
        block = scores.to(accumulation_dtype(x.dtype))
        weights = torch.empty_like(block)
        mine = block.new_empty(len(block), self.rule.measures)
        for few in cached_rows(block):
            mine[few] = self.rule.measure(block[few], weights[few])
        measured = self.rule.join(everyones(mine, self.group))
        stats = block.new_empty(len(block), self.rule.numbers)
        for few in cached_rows(block):
            numbers = self.rule.weigh(block[few], weights[few], measured[few])
            torch.cat(numbers, dim=1, out=stats[few])
        out = weights.to(x.dtype) @ values
        dist.all_reduce(out, group=self.group)
        return out, (scores, stats)

    def backward(self, grad: Tensor, x: Tensor, keys: Tensor, values: Tensor, kept: Kept) -> Grads:
        scores, stats = kept
        block = scores.to(stats.dtype)
        weights, dblock = torch.empty_like(block), torch.empty_like(block)
        product(grad, values.T, dblock)

        def pass_over(few: slice) -> Pass:
            work = torch.empty_like(block[few])
            return Pass(block[few], dblock[few], weights[few], work, stats[few].split(1, dim=1))

        along, dscale = stats.new_empty(len(block), 1), stats.new_zeros(())
        for few in cached_rows(block):
            along[few] = self.rule.begin_backward(pass_over(few))
        dist.all_reduce(along, group=self.group)
        for few in cached_rows(block):
            dscale += self.rule.end_backward(pass_over(few), along[few]).sum()
        dscores = dblock.to(x.dtype)
        dx = dscores @ keys
        summed = dist.all_reduce(dx, group=self.group, async_op=True) if self.sum_gradient else None
        dkeys, dvalues = dscores.T @ x, weights.to(x.dtype).T @ grad  # meanwhile
        if summed is not None:
            summed.wait()
        return dx, dkeys, dvalues, dscale


def everyones(mine: Tensor, group: Group) -> Tensor:
    """[R, k] of each process -> [P, R, k]."""
    found = mine.new_empty(dist.get_world_size(group), *mine.shape)
    dist.all_gather([*found], mine, group=group)
    return found


class SumGradient(torch.autograd.Function):
    """The identity, whose gradient is summed over a group: for rows that several calls without
    `sum_gradient` share."""

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
        raise NotImplementedError("tokens spread over processes have no gradients of gradients")
