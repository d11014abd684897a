"""Runs and compares backends of pattention."""

import torch
from torch import Tensor

from tokenformer.ops import pattention


def random_inputs(
    *shapes: tuple[int, ...],
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    device: str = "cpu",
) -> list[Tensor]:
    """Return normal tensors of these shapes that require gradients."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [tensor.to(device, dtype).requires_grad_() for tensor in tensors]


def output_and_gradients(backend: str, inputs: list[Tensor], **options: object) -> list[Tensor]:
    """Return the output and the gradients of the inputs, and of the scale if it is a tensor."""
    out = pattention(*inputs, backend=backend, **options)
    scale = options.get("scale_tokens")
    wanted = [*inputs, scale] if isinstance(scale, Tensor) else inputs
    grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device)
    return [out, *torch.autograd.grad(out, wanted, grad.reshape(out.shape))]


def assert_close(found: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        largest = other.abs().max().item() if other.numel() else 0.0
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * (largest + 1e-3))


def assert_as_accurate(backend: str, inputs: list[Tensor], **options: object) -> None:
    """Assert that a backend is as accurate as the reference, or within a few roundings of the
    largest entry. The reference's error is the largest over some orders of the tokens: where sums
    cancel, that of a single order is a matter of luck, and of the processor."""
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    truth = output_and_gradients("reference", exact, **options)
    found = output_and_gradients(backend, inputs, **options)
    usual = torch.stack([reference_errors(inputs, truth, seed, **options) for seed in range(8)])
    for one, true, most in zip(found, truth, usual.amax(dim=0), strict=True):
        assert one.dtype == inputs[0].dtype
        error = (one.double() - true).abs().max()
        rounding = torch.finfo(one.dtype).eps * true.abs().max()
        assert error <= 2 * most + 8 * rounding, (error, most, true.abs().max())


def reference_errors(
    inputs: list[Tensor], truth: list[Tensor], seed: int, **options: object
) -> Tensor:
    """Return the largest error of the output and of every gradient with the tokens in a random
    order."""
    x, *tokens = inputs
    order = torch.randperm(len(tokens[0]), generator=torch.Generator().manual_seed(seed))
    order = order.to(x.device)
    permuted = [tensor.detach()[order].requires_grad_() for tensor in tokens]
    out, dx, *gradients = output_and_gradients("reference", [x, *permuted], **options)
    wanted = [*truth[:2], *(true[order] if true.ndim else true for true in truth[2:])]
    return torch.stack(
        [
            (one.double() - true).abs().max()
            for one, true in zip([out, dx, *gradients], wanted, strict=True)
        ]
    )
