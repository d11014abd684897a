"""The modified softmaxes against their formulas in float64 (tests/support/theta.py)."""

import math

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.theta import expected_weights
from tokenformer.ops.theta import THETAS

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NORMALIZING = ("l2_gelu", "gelu_l2", "l1_gelu")


@settings(max_examples=300, deadline=None)
@given(
    scores=hnp.arrays(
        np.float64,
        hnp.array_shapes(min_dims=1, max_dims=3, max_side=6),
        elements=st.floats(-1e4, 1e4, width=16),
    ),
    theta=st.sampled_from(list(THETAS)),
    dtype=st.sampled_from(DTYPES),
    approximate=st.sampled_from(["none", "tanh"]),
    scale=st.floats(0.5, 1e5),
    eps=st.sampled_from([0.0, 1e-5, 0.5]),
)
@example(np.zeros((2, 3)), "l2_gelu", torch.float32, "none", 3.0, 0.0)
@example(np.array([[1e4, -1e4]]), "softmax", torch.float32, "none", 2.0, 0.0)
@example(np.array([[1e-3, 2.0, 3.0]]), "gelu_l2", torch.bfloat16, "none", 3.0, 0.0)
def test_follows_its_formula(scores, theta, dtype, approximate, scale, eps):
    if theta == "gelu_l2":
        # A row of very negative scores alone has only GELU's tail, which torch computes as
        # 1 + erf(x) and so loses to rounding; one ordinary score in the row makes the tail small.
        scores[..., 0] = 1.0
    A = torch.tensor(scores).to(dtype)
    weights = THETAS[theta](A, scale, approximate, eps)
    assert weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = expected_weights(theta, A.double().numpy(), scale, approximate, eps)
    # Even half-precision scores give weights good to fp32: only the caller rounds them.
    precision = 1e-12 if dtype == torch.float64 else 3e-6
    np.testing.assert_allclose(
        weights.double().numpy(),
        expected,
        rtol=precision,
        atol=precision * max(1.0, np.abs(expected).max()),
    )


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norm_of_a_long_half_precision_row(theta, dtype):
    # Its squares sum to 4e9 and its absolute values to 2e7, both beyond fp16; in bf16 a running sum
    # would stop growing after 256 terms.
    n = 100_000
    A = torch.where(torch.arange(n) % 2 == 0, 200.0, -200.0).to(dtype)[None]
    weights = THETAS[theta](A, float(n), "none", 0.0)
    expected = expected_weights(theta, A.double().numpy(), float(n))
    np.testing.assert_allclose(weights.double().numpy(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("theta", NORMALIZING)
@pytest.mark.parametrize("eps", [0.0, 1e-5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_rows_have_zero_weights_and_gradients(theta, eps, dtype):
    torch.manual_seed(0)
    others = torch.randn(3, 5).to(dtype)
    scores = others.clone()
    scores[1] = 0
    scores.requires_grad_()
    others.requires_grad_()
    slopes = torch.randn(3, 5)
    weights = THETAS[theta](scores, 5.0, "none", eps)
    (weights * slopes).sum().backward()
    assert torch.equal(weights[1], torch.zeros(5, dtype=weights.dtype))
    assert torch.equal(scores.grad[1], torch.zeros(5, dtype=dtype))
    # The other rows are unaffected.
    neighbours = THETAS[theta](others, 5.0, "none", eps)
    (neighbours * slopes).sum().backward()
    for row in (0, 2):
        assert torch.equal(weights[row], neighbours[row])
        assert torch.equal(scores.grad[row], others.grad[row])


@pytest.mark.parametrize("theta", NORMALIZING)
def test_rows_whose_squares_underflow_count_as_zero(theta):
    scores = torch.full((1, 4), 1e-25, requires_grad=True)
    weights = THETAS[theta](scores, 4.0, "none", 0.0)
    weights.sum().backward()
    assert not weights.any()
    assert not scores.grad.any()


@pytest.mark.parametrize("theta", ["l2_gelu", "l1_gelu"])
def test_smallest_half_precision_row_is_not_zero(theta):
    scores = torch.tensor([[2.0**-24, -(2.0**-24)]], dtype=torch.float16)
    weights = THETAS[theta](scores, 2.0, "none", 0.0)
    expected = expected_weights(theta, np.array([[1.0, -1.0]]), 2.0)
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_does_not_overflow(dtype):
    top = 60000.0
    weights = THETAS["softmax"](torch.tensor([[top, top, -top]], dtype=dtype), 3.0, "none", 0.0)
    assert weights.tolist() == [[1.5, 1.5, 0.0]]


@pytest.mark.parametrize("theta", ["l2_gelu", "l1_gelu"])
def test_size_of_the_scores_does_not_matter(theta):
    torch.manual_seed(0)
    scores = torch.randn(7, 11)
    weights = THETAS[theta](scores, 11.0, "none", 0.0)
    for power in (-40, -3, 5, 40):  # powers of two commute with rounding, so to the last bit
        assert torch.equal(THETAS[theta](scores * 2.0**power, 11.0, "none", 0.0), weights)
    assert not torch.allclose(THETAS[theta](-scores, 11.0, "none", 0.0), weights)


@pytest.mark.parametrize("theta", ["gelu_l2", "softmax"])
def test_size_of_the_scores_matters_where_it_should(theta):
    scores = torch.tensor([[1.0, -1.0, 2.0]])
    weights = THETAS[theta](scores, 3.0, "none", 0.0)
    assert not torch.allclose(THETAS[theta](2 * scores, 3.0, "none", 0.0), weights, atol=1e-2)


def normal_cdf(z: torch.Tensor) -> torch.Tensor:
    return 0.5 * torch.erfc(-z / math.sqrt(2))


def normal_density(z: torch.Tensor) -> torch.Tensor:
    return torch.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)


@pytest.mark.parametrize("n", [1, 2, 9])
def test_jacobian_of_l2_gelu_in_appendix_a(n):
    torch.manual_seed(n)
    A = torch.randn(n, dtype=torch.float64) * 3
    jacobian = torch.autograd.functional.jacobian(
        lambda scores: THETAS["l2_gelu"](scores, float(n), "none", 0.0), A
    )
    norm = A.square().sum().sqrt()
    Z = A * math.sqrt(n) / norm
    slope = normal_cdf(Z) + Z * normal_density(Z)  # f', the derivative of the exact GELU
    expected = slope[:, None] / (math.sqrt(n) * norm) * (n * torch.eye(n) - torch.outer(Z, Z))
    torch.testing.assert_close(jacobian, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("scale", [1.0, 7.0])
def test_jacobian_of_softmax_in_appendix_a(scale):
    n, d = 7, 5
    torch.manual_seed(0)
    A = torch.randn(n, dtype=torch.float64) * 3
    jacobian = torch.autograd.functional.jacobian(
        lambda scores: THETAS["softmax"](scores / math.sqrt(d), scale, "none", 0.0), A
    )
    exponentials = torch.exp(A / math.sqrt(d))
    S = exponentials / exponentials.sum()
    # The paper's softmax sums to 1; ours to the scale.
    expected = scale / math.sqrt(d) * S[:, None] * (torch.eye(n) - S[None, :])
    torch.testing.assert_close(jacobian, expected, rtol=1e-10, atol=1e-12)
