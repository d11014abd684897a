"""Runs a `Kernel` under autograd and under torch.compile.

In eager mode a kernel is an autograd function. torch.compile sees two registered operators instead,
so it need not unroll the kernel's loops.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tokenformer.ops.backends.direct import Direct
from tokenformer.ops.backends.interface import Gradients, Kernel, Sizes, is_trained
from tokenformer.ops.backends.streamed import make_streamed
from tokenformer.ops.backends.triton import Triton
from tokenformer.ops.theta import ThetaOptions, accumulation_dtype

MakeKernel = Callable[[ThetaOptions], Kernel]
KERNELS: dict[str, MakeKernel] = {"direct": Direct, "streamed": make_streamed, "triton": Triton}


def run(kernel: str, x: Tensor, keys: Tensor, values: Tensor, options: ThetaOptions) -> Tensor:
    """Pattention by a kernel, with any leading dimensions."""
    x, keys, values = autocast(x, keys, values)
    theta, scale, approximate, eps = options
    if torch.compiler.is_compiling():
        scale = torch.as_tensor(scale, dtype=accumulation_dtype(x.dtype), device=x.device)
        rows = as_rows(x)
        out = compiled_forward(rows, keys, values, scale, kernel, theta, approximate, eps)[0]
        return with_leading(out, x)
    if not is_trained(x, keys, values, scale):
        with no_autocast(x):
            out, _ = KERNELS[kernel](options).forward(as_rows(x), keys, values, save=False)
            return with_leading(out, x)
    return KernelFunction.apply(x, keys, values, scale, KERNELS[kernel], (theta, approximate, eps))


def as_rows(x: Tensor) -> Tensor:
    """[..., d] -> [R, d]"""
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def with_leading(rows: Tensor, x: Tensor) -> Tensor:
    """Rows [R, d_out] of x [..., d_in] -> [..., d_out]"""
    return rows if x.ndim == 2 else rows.view(*x.shape[:-1], rows.shape[-1])


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, the tensors in the dtype that matrix products would cast them to."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Inputs have been cast already; inside a kernel wide tensors are meant to stay wide."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


class KernelFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float | Tensor,
        make: MakeKernel,
        settings: tuple[str, str, float],
    ) -> Tensor:
        with no_autocast(x):
            out, saved = make(theta_options(scale, settings)).forward(as_rows(x), keys, values)
        # A scale that is a tensor may be learned, and may be changed in place before the backward.
        is_tensor = isinstance(scale, Tensor)
        ctx.save_for_backward(x, keys, values, *saved, *([scale] if is_tensor else []))
        ctx.scale, ctx.make, ctx.settings = None if is_tensor else scale, make, settings
        return with_leading(out, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, keys, values, *saved = ctx.saved_tensors
        scale = saved.pop() if ctx.scale is None else ctx.scale
        options = theta_options(scale, ctx.settings)
        if torch.is_grad_enabled():  # create_graph: the gradient itself needs a gradient
            grads = differentiable_gradients(grad, x, keys, values, options)
        else:
            with no_autocast(x):
                kernel, rows = ctx.make(options), as_rows(grad.contiguous())
                dx, *others = kernel.backward(rows, as_rows(x), keys, values, tuple(saved))
                grads = (dx.view(x.shape), *others)
        dscale = None if ctx.scale is not None else grads[3].to(scale.dtype).reshape(scale.shape)
        return (*grads[:3], dscale, None, None)


def theta_options(scale: float | Tensor, settings: tuple[str, str, float]) -> ThetaOptions:
    theta, approximate, eps = settings
    return ThetaOptions(theta, scale, approximate, eps)


def differentiable_gradients(
    grad: Tensor, x: Tensor, keys: Tensor, values: Tensor, options: ThetaOptions
) -> Gradients:
    """The gradients with a graph of their own, by autograd on the reference formula."""
    scale = options.scale
    inputs = [x, keys, values, scale if isinstance(scale, Tensor) else x.new_tensor(scale)]
    for place, tensor in enumerate(inputs):
        if not tensor.requires_grad:
            inputs[place] = tensor.detach().requires_grad_()
    rows, k, v, s = inputs
    out = options._replace(scale=s).weights(rows @ k.T).to(rows.dtype) @ v
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
    with no_autocast(x):
        made = KERNELS[kernel](ThetaOptions(theta, scale, approximate, eps))
        out, saved = made.forward(x, keys, values)
    return [out, *saved]


@compiled_forward.register_fake
def _(
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: Tensor,
    kernel: str,
    theta: str,
    approximate: str,
    eps: float,
) -> list[Tensor]:
    sizes = Sizes(*x.shape, *values.shape)
    saved = KERNELS[kernel](ThetaOptions(theta, 1.0, approximate, eps)).saved_tensors(
        sizes, x.dtype
    )
    out = x.new_empty(sizes.rows, sizes.d_out)
    return [out, *(x.new_empty(shape, dtype=dtype) for shape, dtype in saved)]


@torch.library.custom_op("tokenformer::pattention_backward", mutates_args=())
def compiled_backward(
    grad: Tensor,
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: Tensor,
    saved: list[Tensor],
    kernel: str,
    theta: str,
    approximate: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = KERNELS[kernel](ThetaOptions(theta, scale, approximate, eps))
    with no_autocast(x):
        return made.backward(grad.contiguous(), x, keys, values, tuple(saved))


@compiled_backward.register_fake
def _(grad: Tensor, x: Tensor, keys: Tensor, values: Tensor, scale: Tensor, *_: Any) -> Gradients:
    return (
        torch.empty_like(x),
        torch.empty_like(keys),
        torch.empty_like(values),
        scale.new_empty((), dtype=accumulation_dtype(x.dtype)),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, keys, values, scale, *settings = inputs
    ctx.save_for_backward(x, keys, values, scale, *output[1:])
    ctx.settings = settings


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    x, keys, values, scale, *saved = ctx.saved_tensors
    dx, dkeys, dvalues, dscale = compiled_backward(
        grads[0], x, keys, values, scale, saved, *ctx.settings
    )
    return dx, dkeys, dvalues, dscale.reshape(scale.shape).to(scale.dtype), None, None, None, None


compiled_forward.register_autograd(_backward, setup_context=_save)
