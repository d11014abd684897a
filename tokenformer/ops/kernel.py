"""Kernels with a backward pass of their own, in autograd and under torch.compile.

A kernel has `forward(x, keys, values) -> (out, kept)` and `backward(grad, x, keys, values, kept)`,
both on rows [R, d]. In eager mode it is an autograd function; torch.compile sees two registered
operators instead, whose loops it need not unroll.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from tokenformer.ops.direct import Direct
from tokenformer.ops.fused import Fused
from tokenformer.ops.rules import RULES, Grads, Kept, Scale, is_trained
from tokenformer.ops.streamed import streamed
from tokenformer.ops.theta import THETAS, accumulation_dtype


class Kernel(Protocol):
    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, *, keep: bool = True
    ) -> tuple[Tensor, Kept]:
        """Without `keep` no backward pass follows."""
        ...

    def backward(
        self, grad: Tensor, x: Tensor, keys: Tensor, values: Tensor, kept: Kept
    ) -> Grads: ...


MakeKernel = Callable[[str, Scale, str, float], Kernel]
KERNELS: dict[str, MakeKernel] = {
    "direct": Direct,
    "streamed": streamed,
    "triton": Fused,
}


def run(
    kernel: str,
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: Scale,
    theta: str,
    approximate: str,
    eps: float,
) -> Tensor:
    """Pattention by a kernel, of any leading dimensions."""
    x, keys, values = autocast(x, keys, values)
    rows = x.reshape(-1, x.shape[-1])
    options = (theta, approximate, eps)
    if torch.compiler.is_compiling():
        scale = torch.as_tensor(scale, dtype=accumulation_dtype(x.dtype), device=x.device)
        out = compiled_forward(rows, keys, values, scale, kernel, *options)[0]
    elif not is_trained(x, keys, values, scale):
        with as_they_are(x):
            found = KERNELS[kernel](theta, scale, approximate, eps)
            out = found.forward(rows, keys, values, keep=False)[0]
    else:
        out = ByHand.apply(rows, keys, values, scale, KERNELS[kernel], options)
    return out.reshape(*x.shape[:-1], values.shape[1])


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, tensors as its matrix products take them."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def as_they_are(x: Tensor) -> AbstractContextManager[Any]:
    """Autocast has had its say; inside a kernel, what is wide is meant to be."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


class ByHand(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: Scale,
        make: MakeKernel,
        options: tuple[str, str, float],
    ) -> Tensor:
        theta, approximate, eps = options
        with as_they_are(x):
            out, kept = make(theta, scale, approximate, eps).forward(x, keys, values)
        moves = isinstance(scale, Tensor)
        ctx.save_for_backward(x, keys, values, *kept, *([scale] if moves else []))
        ctx.scale, ctx.make, ctx.options = None if moves else scale, make, options
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, keys, values, *kept = ctx.saved_tensors
        scale = kept.pop() if ctx.scale is None else ctx.scale
        theta, approximate, eps = ctx.options
        if torch.is_grad_enabled():  # the gradient itself is to have a gradient
            grads = by_autograd(grad, x, keys, values, scale, theta, approximate, eps)
        else:
            kernel = ctx.make(theta, scale, approximate, eps)
            with as_they_are(x):
                grads = kernel.backward(grad.contiguous(), x, keys, values, tuple(kept))
        dscale = None if ctx.scale is not None else grads[3].to(scale.dtype).reshape(scale.shape)
        return (*grads[:3], dscale, None, None)


def by_autograd(
    grad: Tensor,
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: Scale,
    theta: str,
    approximate: str,
    eps: float,
) -> Grads:
    """The gradients with a graph of their own, from the plain formula."""
    moving = scale if isinstance(scale, Tensor) else x.new_tensor(scale)
    inputs = [x, keys, values, moving]
    for place, tensor in enumerate(inputs):
        if not tensor.requires_grad:
            inputs[place] = tensor.detach().requires_grad_()
    rows, k, v, s = inputs
    out = THETAS[theta](rows @ k.T, s, approximate, eps).to(rows.dtype) @ v
    return torch.autograd.grad(out, inputs, grad, create_graph=True)  # type: ignore[return-value]


@torch.library.custom_op("tokenformer::pattention", mutates_args=())
def compiled_forward(
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: Tensor,
    kernel: str,
    theta: str,
    approximate: str,
    eps: float,
) -> list[Tensor]:
    with as_they_are(x):
        out, kept = KERNELS[kernel](theta, scale, approximate, eps).forward(x, keys, values)
    return [out, *kept]


@compiled_forward.register_fake
def _(
    x: Tensor, keys: Tensor, values: Tensor, scale: Tensor, kernel: str, theta: str, *_: Any
) -> list[Tensor]:
    out = x.new_empty(x.shape[0], values.shape[1])
    return [out, *kept_shapes(kernel, theta, x, keys, values)]


def kept_shapes(kernel: str, theta: str, x: Tensor, keys: Tensor, values: Tensor) -> list[Tensor]:
    wide = accumulation_dtype(x.dtype)

    def numbers(count: int) -> Tensor:
        return x.new_empty(x.shape[0], count, dtype=wide)

    if kernel == "triton":
        return [numbers(1) for _ in range(2 if theta == "softmax" else 1)]
    if kernel == "direct":
        return [x.new_empty(x.shape[0], keys.shape[0]), numbers(RULES[theta].numbers)]
    if theta in ("l2_gelu", "l1_gelu"):
        width = x.shape[1] if streamed(theta, 1.0, "none", 0.0).uses_gram(x) else 0
        return [numbers(1), numbers(1), x.new_empty(width, width, dtype=wide)]
    outputs = numbers(values.shape[1])
    return [numbers(1), numbers(1), outputs] if theta == "gelu_l2" else [numbers(1), outputs]


@torch.library.custom_op("tokenformer::pattention_backward", mutates_args=())
def compiled_backward(
    grad: Tensor,
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: Tensor,
    kept: list[Tensor],
    kernel: str,
    theta: str,
    approximate: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found = KERNELS[kernel](theta, scale, approximate, eps)
    with as_they_are(x):
        return found.backward(grad.contiguous(), x, keys, values, tuple(kept))


@compiled_backward.register_fake
def _(grad: Tensor, x: Tensor, keys: Tensor, values: Tensor, scale: Tensor, *_: Any) -> Grads:
    return (
        torch.empty_like(x),
        torch.empty_like(keys),
        torch.empty_like(values),
        scale.new_empty((), dtype=accumulation_dtype(x.dtype)),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, keys, values, scale, *options = inputs
    ctx.save_for_backward(x, keys, values, scale, *output[1:])
    ctx.options = options


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    x, keys, values, scale, *kept = ctx.saved_tensors
    dx, dkeys, dvalues, dscale = compiled_backward(
        grads[0], x, keys, values, scale, kept, *ctx.options
    )
    return dx, dkeys, dvalues, dscale.reshape(scale.shape).to(scale.dtype), None, None, None, None


compiled_forward.register_autograd(_backward, setup_context=_keep)
