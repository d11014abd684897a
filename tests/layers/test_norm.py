"""The norms against torch's own, with every subset of their parameters."""

import pytest
import torch
from torch import Tensor, nn

from tokenformer.layers.norm import NORM_PARAMETERS, NORMS, LayerNorm, RMSNorm

NAMES = {"none": set(), "bias": {"bias"}, "weight": {"weight"}, "weight_bias": {"weight", "bias"}}
SIZE = 24


def randomized(norm: nn.Module) -> nn.Module:
    """Parameters at 1 and 0 would hide one that is never used."""
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    return norm


def by_torch(norm: LayerNorm, x: Tensor) -> Tensor:
    weight = torch.ones(SIZE, dtype=x.dtype) if norm.weight is None else norm.weight
    bias = torch.zeros(SIZE, dtype=x.dtype) if norm.bias is None else norm.bias
    if isinstance(norm, RMSNorm):
        reference = nn.RMSNorm(SIZE, eps=norm.eps, dtype=x.dtype)
        state = {"weight": weight}
        added = bias
    else:
        reference = nn.LayerNorm(SIZE, eps=norm.eps, dtype=x.dtype)
        state = {"weight": weight, "bias": bias}
        added = torch.zeros(())
    reference.load_state_dict(state)
    return reference(x) + added.to(x.dtype)


@pytest.mark.parametrize("parameters", NORM_PARAMETERS)
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("eps", [1e-5, 1e-2])
def test_agrees_with_torch(kind, parameters, eps):
    torch.manual_seed(0)
    norm = randomized(NORMS[kind](SIZE, parameters=parameters, eps=eps, dtype=torch.float64))
    assert {name for name, _ in norm.named_parameters()} == NAMES[parameters]
    # Not centered, to distinguish the two norms, and partly so small that eps matters.
    x = (
        torch.randn(2, 5, SIZE, dtype=torch.float64) * torch.tensor([3.0, 1e-3])[:, None, None]
        + 0.1
    )
    torch.testing.assert_close(norm(x), by_torch(norm, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", NORMS)
def test_non_parametric_rows(kind):
    x = torch.randn(7, SIZE, dtype=torch.float64) * 5 + 2
    normed = NORMS[kind](SIZE, eps=0.0)(x)
    ones = torch.ones(7, dtype=torch.float64)
    torch.testing.assert_close(normed.square().mean(-1), ones)
    centered = torch.allclose(normed.mean(-1), 0 * ones, atol=1e-12)
    assert centered == (kind == "layer_norm")


@pytest.mark.parametrize("parameters", NORM_PARAMETERS)
@pytest.mark.parametrize("kind", NORMS)
def test_bfloat16(kind, parameters):
    torch.manual_seed(0)
    size = 4096  # long enough for a sum in bf16 to go wrong
    norm = randomized(NORMS[kind](size, parameters=parameters, dtype=torch.bfloat16))
    x = (torch.randn(3, size) + 1).bfloat16()
    normed = norm(x)
    assert normed.dtype == torch.bfloat16
    expected = norm.double()(x.double())
    torch.testing.assert_close(normed.double(), expected, rtol=1.6e-2, atol=1.6e-2)


@pytest.mark.parametrize("kind", NORMS)
def test_gradients(kind):
    norm = randomized(NORMS[kind](5, parameters="weight_bias", dtype=torch.float64))
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    weight, bias = norm.weight, norm.bias
    assert torch.autograd.gradcheck(lambda x, *_: norm(x), (x, weight, bias))


@pytest.mark.parametrize("kind", NORMS)
def test_zero_rows_are_finite(kind):
    x = torch.zeros(2, SIZE, requires_grad=True)
    out = NORMS[kind](SIZE)(x)
    out.sum().backward()
    assert not out.any()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("kind", NORMS)
def test_meta_device_then_reset(kind):
    norm = NORMS[kind](SIZE, parameters="weight_bias", device="meta")
    norm.to_empty(device="cpu")
    norm.reset_parameters()
    assert torch.equal(norm.weight, torch.ones(SIZE))
    assert torch.equal(norm.bias, torch.zeros(SIZE))


def test_parameters_are_named():
    assert repr(LayerNorm(8, parameters="bias", eps=1e-6)) == (
        "LayerNorm(8, parameters=bias, eps=1e-06)"
    )
    assert repr(RMSNorm(8)) == "RMSNorm(8, parameters=none, eps=1e-05)"
    with pytest.raises(ValueError, match=r"parameters='affine'.*none, bias, weight, weight_bias"):
        LayerNorm(8, parameters="affine")
