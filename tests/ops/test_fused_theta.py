"""The fused native passes of `l2_gelu`, against the formula in float64."""

import pytest
import torch
from torch import Tensor

from tokenformer.ops.backends.direct import Direct
from tokenformer.ops.backends.native import fused_theta
from tokenformer.ops.backends.native.library import library
from tokenformer.ops.theta import ThetaOptions

needs_compiler = pytest.mark.skipif(library() is None, reason="needs a C++ compiler")
OPTIONS = ThetaOptions("l2_gelu", 37.0, "none", 0.0)


def exact(scores: Tensor, grad: Tensor, options: ThetaOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, gradient of the scores and of the scale, by autograd in float64."""
    wide = scores.double().requires_grad_()
    scale = torch.tensor(float(options.scale), dtype=torch.float64, requires_grad=True)
    weights = options._replace(scale=scale).weights(wide)
    dscores, dscale = torch.autograd.grad(weights, (wide, scale), grad.double())
    return weights.detach(), dscores, dscale


def fused(scores: Tensor, grad: Tensor, options: ThetaOptions) -> tuple[Tensor, Tensor, Tensor]:
    weights, again, dscores = (torch.empty_like(scores) for _ in range(3))
    stats = scores.new_empty(len(scores), 2)
    fused_theta.fill_weights(scores, weights, stats, options)
    dscores.copy_(grad)
    dscale = fused_theta.backward(scores, stats, dscores, again, options).sum()
    assert torch.equal(again, weights)
    return weights, dscores, dscale


@needs_compiler
@pytest.mark.parametrize("tokens", [1, 7, 8, 33, 512])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_values_and_gradients(tokens, size, eps, seed):
    options = OPTIONS._replace(eps=eps)
    scores, grad = size * torch.randn(65, tokens), torch.randn(65, tokens)
    found, wanted = fused(scores, grad, options), exact(scores, grad, options)
    weights, dscores, dscale = (
        (ours.double() - true).abs() for ours, true in zip(found, wanted, strict=True)
    )
    assert weights.max() <= 2e-6 * max(1.0, wanted[0].abs().max().item())
    # The gradient of the scores is a difference of terms as large as the factor.
    factors = float(options.scale) ** 0.5 / (scores.norm(dim=1) + eps)
    assert (dscores.amax(1) / (1 + factors)).max() <= 4e-6
    assert dscale <= 2e-6 * len(scores) * max(1.0, wanted[2].abs().item())


@needs_compiler
def test_gelu_is_as_accurate_as_torchs(seed):
    """Scores of one row, so that the whole range of GELU is covered by large and small ones."""
    row = torch.linspace(-12, 12, 100_001)
    scale = row.double().square().sum().item()  # the factor is 1
    stats, weights = torch.empty(1, 2), torch.empty(1, len(row))
    fused_theta.fill_weights(row[None], weights, stats, OPTIONS._replace(scale=scale))
    true = torch.nn.functional.gelu(row.double() * stats[0, 0].item())
    theirs = torch.nn.functional.gelu(row * stats[0, 0])
    assert (weights[0] - true).abs().max() < 2 * (theirs - true).abs().max()


@needs_compiler
def test_zero_rows_have_zero_weights_and_finite_gradients():
    scores = torch.tensor([[0.0, 0.0, 0.0], [1e-20, 0.0, -1e-21], [1.0, -2.0, 0.5]])
    weights, dscores, dscale = fused(scores, torch.ones(3, 3), OPTIONS)
    assert not weights[:2].any()
    assert not dscores[:2].any()
    assert dscores.isfinite().all()
    assert dscale.isfinite()


@needs_compiler
@pytest.mark.parametrize("rows", [0, 1, 1500])
def test_direct_gives_the_same_with_and_without_it(rows, monkeypatch, seed):
    x, keys, values, grad = (torch.randn(n, 24) for n in (rows, 40, 40, rows))
    kernel = Direct(OPTIONS)

    def run() -> list[Tensor]:
        out, saved = kernel.forward(x, keys, values)
        plain, _ = kernel.forward(x, keys, values, save=False)
        return [out, plain, *saved, *kernel.backward(grad, x, keys, values, saved)]

    assert fused_theta.supports_fused(x, OPTIONS)
    with_native = run()
    monkeypatch.setattr(fused_theta, "supports_fused", lambda *given: False)
    for ours, theirs in zip(with_native, run(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options", [OPTIONS._replace(theta="gelu_l2"), OPTIONS._replace(approximate="tanh")]
)
def test_other_thetas_and_dtypes_take_torchs_operations(options):
    assert not fused_theta.supports_fused(torch.ones(2, 2), options)
    assert not fused_theta.supports_fused(torch.ones(2, 2, dtype=torch.float64), OPTIONS)
    assert not fused_theta.supports_fused(torch.ones(2, 2, dtype=torch.bfloat16), OPTIONS)
    assert not fused_theta.supports_fused(torch.ones(2, 2, device="meta"), OPTIONS)
