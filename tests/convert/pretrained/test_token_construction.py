"""Tokens for linear projections and GELU MLPs are exact to rounding."""

import math

import pytest
import torch
import torch.nn.functional as F

from tokenformer import Pattention, pattention
from tokenformer.convert.pretrained.token_construction import (
    LINEAR_FORMS,
    Affine,
    layer_norm_space,
    linear_tokens,
    mlp_tokens,
    rms_norm_space,
)

SIZE = 24
HEAVY = 1e6


def random_affine(out: int, size: int = SIZE) -> Affine:
    return Affine(torch.randn(out, size).double(), torch.randn(out).double())


def normed_rows(count: int = 200) -> torch.Tensor:
    """Some so small that the norm's eps makes them shorter than the others."""
    rows = torch.randn(count, SIZE).double() * torch.logspace(-3, 1, count).double()[:, None]
    return F.layer_norm(rows, (SIZE,), eps=1e-5)


def attend(space, tokens, y, **options):
    return pattention(
        y + space.offset.to(y),
        tokens.keys.to(y),
        tokens.values.to(y),
        scale_tokens=tokens.scale,
        **options,
    )


def relative(found, wanted):
    return ((found - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("form", LINEAR_FORMS)
@pytest.mark.parametrize("out", [7, SIZE, 40])
def test_a_linear_map_with_bias_is_exact_after_a_layer_norm(seed, out, form, approximate):
    linear, space, y = random_affine(out), layer_norm_space(SIZE), normed_rows()
    tokens = linear_tokens(space, linear, form, approximate, HEAVY)
    found = attend(space, tokens, y, approximate=approximate)
    assert relative(found, linear(y)) < 1e-9
    channels = min(out, SIZE)
    assert tokens.size == (2 * channels if form == "pair" else channels) + 2


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_a_gelu_network_with_biases_is_exact_after_a_layer_norm(seed, approximate):
    up, down = random_affine(50), random_affine(13, 50)
    space, y = layer_norm_space(SIZE), normed_rows()
    tokens = mlp_tokens(space, up, down, approximate, HEAVY)
    wanted = down(F.gelu(up(y), approximate=approximate))
    assert relative(attend(space, tokens, y, approximate=approximate), wanted) < 1e-9
    assert tokens.size == 50 + 2


def test_the_default_ballast_is_exact_to_what_fp32_can_tell(seed):
    up, down = random_affine(50), random_affine(13, 50)
    space, y = layer_norm_space(SIZE), normed_rows()
    wanted = down(F.gelu(up(y)))
    found = attend(space, mlp_tokens(space, up, down, "none"), y.float())
    assert relative(found.double(), wanted) < 1e-5


def test_pairs_stand_bf16_and_shifts_do_not(seed):
    """Why there are two forms: a shift is subtracted again, which takes digits."""
    linear, space, y = random_affine(SIZE), layer_norm_space(SIZE), normed_rows()
    errors = {
        form: relative(
            attend(space, linear_tokens(space, linear, form, "none"), y.bfloat16()).double(),
            linear(y),
        )
        for form in LINEAR_FORMS
    }
    assert errors["pair"] < 0.01 < errors["shift"]


def test_the_token_that_holds_the_norm_gets_no_weight_and_no_gradient(seed):
    """It must not be what training moves first: its score is enormous."""
    up, down, space = random_affine(50), random_affine(13, 50), layer_norm_space(SIZE)
    tokens = mlp_tokens(space, up, down, "none")
    layer = Pattention(SIZE, 13, tokens.size, scale_tokens=tokens.scale).double()
    layer.load_state_dict({"key_tokens": tokens.keys, "value_tokens": tokens.values})
    layer(normed_rows() + space.offset).square().sum().backward()
    assert layer.value_tokens.grad[-1].abs().max() == 0
    assert layer.value_tokens.grad[:-1].abs().min() > 0
    assert layer.key_tokens.grad[-1].norm() < layer.key_tokens.grad[:-1].norm(dim=1).min()


def test_after_an_rms_norm_a_direction_without_variance_costs_nothing(seed):
    """Rows in a hyperplane have a constant direction; others lose the one that is least missed."""
    plane = torch.linalg.qr(torch.randn(SIZE, SIZE).double())[0][:, 1:]
    y = F.rms_norm(torch.randn(4000, SIZE - 1).double() @ plane.T, (SIZE,))
    linear = random_affine(9)
    space = rms_norm_space(y.mean(0), y.T.cov(), [linear])
    tokens = linear_tokens(space, linear, "pair", "none", HEAVY)
    assert relative(attend(space, tokens, y), linear(y)) < 1e-3  # the ridge is what is left


def test_after_an_rms_norm_the_least_is_given_up(seed):
    """No bias along a channel, nor along the direction of least variance, could lose less."""
    scales = torch.linspace(0.2, 2, SIZE).double()
    mix = torch.randn(SIZE, SIZE).double()
    y = F.rms_norm(torch.randn(4000, SIZE).double() * scales @ mix + 0.3, (SIZE,))
    linear = random_affine(40)
    covariance = y.T.cov()
    space = rms_norm_space(y.mean(0), covariance, [linear])
    tokens = linear_tokens(space, linear, "pair", "none", HEAVY)
    found = (attend(space, tokens, y) - linear(y)).square().sum(1).mean()

    def error(direction):
        """Of the best keys with k.u = 0, and of a constant that moves with what is given up."""
        variance = 1 / (direction @ torch.linalg.solve(covariance, direction))
        lost = (linear.weight @ direction).square().sum()
        outputs = linear(y).square().sum(1).mean()
        return variance * (lost + outputs / space.offset.square().sum())

    others = [*torch.eye(SIZE).double(), torch.linalg.eigh(covariance)[1][:, 0]]
    assert found < min(error(direction) for direction in others)
    assert math.isclose(found, error(space.offset / space.offset.norm()), rel_tol=0.1)


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match="linear='halves' is unknown; choose one of pair, shift"):
        linear_tokens(layer_norm_space(SIZE), random_affine(5), "halves", "none")
