"""Several Pattentions of one input, such as q, k and v, in one native call on a CPU.

One call instead of three: their scores are one matrix product, and so are the gradients of their
keys and of the input.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenformer.ops.backends.auto import choose
from tokenformer.ops.backends.autograd import as_rows, differentiable_gradients, with_leading
from tokenformer.ops.backends.interface import is_trained
from tokenformer.ops.backends.native import fused
from tokenformer.ops.backends.native.fused import TokenGroup
from tokenformer.ops.theta import ThetaOptions


def supports(x: Tensor, groups: Sequence[TokenGroup]) -> bool:
    """Whether `run` can take these layers, and would otherwise take each with `direct`."""
    return (
        not torch.is_autocast_enabled("cpu")
        and all(choose(x, g.keys, g.values, g.options.scale) == "direct" for g in groups)
        and fused.supports(x, *groups)
    )


def run(x: Tensor, groups: Sequence[TokenGroup]) -> list[Tensor]:
    """Rows x [..., d_in] -> [..., d_out] of each layer. The scales must be numbers."""
    tensors = [tensor for group in groups for tensor in (group.keys, group.values)]
    if is_trained(x, *tensors):
        return list(JointFunction.apply(x, [group.options for group in groups], *tensors))
    outs, _ = fused.forward(as_rows(x), groups, save=False)
    return [with_leading(out, x) for out in outs]


def make_groups(tensors: Sequence[Tensor], options: Sequence[ThetaOptions]) -> list[TokenGroup]:
    return [TokenGroup(*some) for some in zip(tensors[::2], tensors[1::2], options, strict=True)]


class JointFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, options: Sequence[Any], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        outs, saved = fused.forward(as_rows(x), make_groups(tensors, options), save=True)
        ctx.save_for_backward(x, *saved, *tensors)
        ctx.options = options
        return tuple(with_leading(out, x) for out in outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, scores, stats, *tensors = ctx.saved_tensors
        groups = make_groups(tensors, ctx.options)
        if torch.is_grad_enabled():  # create_graph: the gradient itself needs a gradient
            found = [
                differentiable_gradients(grad, x, *group)
                for grad, group in zip(grads, groups, strict=True)
            ]
            dx = sum(part[0] for part in found)
            return dx, None, *(gradient for part in found for gradient in part[1:3])
        rows = [as_rows(grad.contiguous()) for grad in grads]
        dx, parts = fused.backward(rows, as_rows(x), groups, (scores, stats))
        return dx.view(x.shape), None, *(gradient for part in parts for gradient in part[:2])
