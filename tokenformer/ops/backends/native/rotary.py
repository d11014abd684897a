"""Rotary positions of queries and keys in one native pass, forward and backward, on a CPU."""

from typing import Any

import torch
from torch import Tensor

from tokenformer.ops.backends.native.library import function, library

NUMBERS_PER_THREAD = 1 << 15
"""Numbers of each thread at least; starting a thread for fewer costs more than it saves."""


def supports(heads: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether native code can rotate heads [B, H, T, head_dim] that were split from rows."""
    return (
        heads.is_cpu
        and heads.dtype is cos.dtype is torch.float32
        and heads.transpose(1, 2).is_contiguous()
        and cos.is_contiguous()
        and sin.is_contiguous()
        and not cos.requires_grad
        and library() is not None
    )


def rotate_all(cos: Tensor, sin: Tensor, *heads: Tensor) -> tuple[Tensor, ...]:
    """Rotate the leading channels of each of `heads` by cos and sin [B or 1, T, dim]."""
    return Rotate.apply(cos, sin, *heads)


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cos: Tensor, sin: Tensor, *heads: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        return tuple(rotated(part, cos, sin, 1.0) for part in heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: the inverse rotation, itself differentiable
            return None, None, *Rotate.apply(cos, -sin, *map(by_rows, grads))
        return None, None, *(rotated(by_rows(grad), cos, sin, -1.0) for grad in grads)


def by_rows(heads: Tensor) -> Tensor:
    """The same tensor [B, H, T, head_dim], in the memory layout of rows [B, T, H * head_dim]."""
    return heads.transpose(1, 2).contiguous().transpose(1, 2)


def rotated(heads: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    rows = heads.transpose(1, 2)  # [B, T, H, head_dim]
    out = torch.empty_like(rows)
    dim = cos.shape[-1]
    function("rotary")(
        rows.data_ptr(),
        out.data_ptr(),
        *rows.shape,
        dim,
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[1] * dim if cos.shape[0] > 1 else 0,
        sign,
        max(1, min(torch.get_num_threads(), rows.numel() // NUMBERS_PER_THREAD)),
    )
    return out.transpose(1, 2)
