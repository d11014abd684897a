"""Pattention against an independent float64 formula, the paper's algebra and the released modes."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.autograd import gradcheck, gradgradcheck

import tokenformer
from tests.support.theta import expected_weights
from tokenformer.ops import BACKENDS, THETAS, pattention

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def tensors(
    *leading: int, d_in: int = 5, n: int = 7, d_out: int = 4, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((*leading, d_in), (n, d_in), (n, d_out))
    return tuple(  # type: ignore[return-value]
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    )


def test_public_name_is_the_operator():
    assert tokenformer.pattention is pattention


@settings(max_examples=250, deadline=None)
@given(
    leading=st.lists(st.integers(0, 3), max_size=3),
    d_in=st.integers(1, 5),
    n=st.integers(1, 6),
    d_out=st.integers(1, 5),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from(DTYPES),
    theta=st.sampled_from(list(THETAS)),
    approximate=st.sampled_from(["none", "tanh"]),
    scale=st.none() | st.floats(0.5, 100.0),
    eps=st.sampled_from([0.0, 1e-5]),
)
def test_follows_the_formula(leading, d_in, n, d_out, seed, dtype, theta, approximate, scale, eps):
    rng = np.random.default_rng(seed)
    # Multiples of 1/32 up to 45/32, so that the scores are exact in every dtype: what is left is
    # the rounding of the weights and of their product with V, for which there is a bound.
    x = rng.integers(-3, 4, (*leading, d_in)) / 8
    K = rng.integers(-3, 4, (n, d_in)) / 4
    V = torch.tensor(rng.standard_normal((n, d_out))).to(dtype)
    out = pattention(
        torch.tensor(x).to(dtype),
        torch.tensor(K).to(dtype),
        V,
        scale_tokens=scale,
        theta=theta,
        approximate=approximate,
        eps=eps,
    )
    assert out.dtype == dtype
    assert out.shape == (*leading, d_out)
    if out.numel() == 0:
        return
    s = float(n) if scale is None else scale
    weights = expected_weights(theta, x @ K.T, s, approximate, eps)
    V = V.double().numpy()
    rounding = 8 * max(torch.finfo(dtype).eps, 1e-14) * (np.abs(weights) @ np.abs(V))
    # In its left tail torch's GELU is exact to eps times its argument, at most s, not its value.
    wide = torch.promote_types(dtype, torch.float32)
    tail = 4 * torch.finfo(wide).eps * max(s, 1.0) * np.abs(V).sum(0)
    underflow = 1e-6 if dtype == torch.float16 else 0.0
    bound = rounding + tail + underflow
    assert (np.abs(out.double().numpy() - weights @ V) <= bound).all()


@pytest.mark.parametrize(
    ("theta", "approximate", "eps"),
    [
        *itertools.product(("l2_gelu", "gelu_l2", "l1_gelu"), ("none", "tanh"), (0.0, 1e-2)),
        ("softmax", "none", 0.0),  # which has neither GELU nor norm
    ],
)
def test_gradients_and_their_gradients(theta, approximate, eps):
    x, K, V = (t.requires_grad_() for t in tensors(2, d_in=3, n=4, d_out=2))
    scale = torch.tensor(3.5, dtype=torch.float64, requires_grad=True)

    def call(x, K, V, scale):
        return pattention(
            x, K, V, scale_tokens=scale, theta=theta, approximate=approximate, eps=eps
        )

    assert gradcheck(call, (x, K, V, scale))
    assert gradgradcheck(call, (x, K, V, scale))


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 1, 3), (1, 4, 1), (5, 1, 2)])
def test_gradients_of_odd_shapes(theta, sizes):
    d_in, n, d_out = sizes
    inputs = [t.requires_grad_() for t in tensors(3, d_in=d_in, n=n, d_out=d_out)]
    assert gradcheck(lambda x, K, V: pattention(x, K, V, theta=theta), inputs)


@pytest.mark.parametrize(
    ("theta", "released"),
    [
        ("l2_gelu", lambda A, n: F.gelu(A * math.sqrt(n) / A.norm(p=2, dim=-1, keepdim=True))),
        (
            "gelu_l2",
            lambda A, n: F.gelu(A) / F.gelu(A).norm(p=2, dim=-1, keepdim=True) * math.sqrt(n),
        ),
        ("softmax", lambda A, n: A.exp() / A.exp().norm(p=1, dim=-1, keepdim=True) * n),
    ],
)
def test_modes_of_the_released_code(theta, released):
    x, K, V = tensors(2, 3, n=11)
    expected = released(x @ K.T, 11) @ V
    torch.testing.assert_close(pattention(x, K, V, theta=theta), expected)


def test_default_is_the_released_configuration():
    x, K, V = tensors(6)
    explicit = pattention(x, K, V, theta="l2_gelu", approximate="none", eps=0.0, scale_tokens=7)
    assert torch.equal(pattention(x, K, V), explicit)
    for other in ({"theta": "l1_gelu"}, {"approximate": "tanh"}, {"eps": 1e-1}):
        assert not torch.allclose(pattention(x, K, V, **other), explicit, atol=1e-6)


@pytest.mark.parametrize("theta", ["l2_gelu", "l1_gelu"])
@pytest.mark.parametrize("factor", [1e-6, 0.3, 7.0, 1e8])
def test_size_of_an_input_row_does_not_matter(theta, factor):
    x, K, V = tensors(9)
    factors = torch.linspace(1, factor, 9, dtype=torch.float64)[:, None]
    out = pattention(x, K, V, theta=theta)
    torch.testing.assert_close(pattention(x * factors, K, V, theta=theta), out)
    assert not torch.allclose(pattention(-x, K, V, theta=theta), out, atol=1e-3)


@pytest.mark.parametrize("theta", THETAS)
def test_order_of_the_tokens_does_not_matter(theta):
    x, K, V = tensors(9)
    order = torch.randperm(len(K))
    shuffled = pattention(x, K[order], V[order], theta=theta)
    torch.testing.assert_close(shuffled, pattention(x, K, V, theta=theta))


@pytest.mark.parametrize("theta", THETAS)
def test_zero_keys_change_nothing_at_a_kept_scale(theta):
    """The paper's appendix on zero initialization; softmax is its counterexample."""
    x, K, V = tensors(9)
    grown_K = torch.cat((K, torch.zeros(4, 5, dtype=torch.float64)))
    grown_V = torch.cat((V, torch.randn(4, 4, dtype=torch.float64)))
    before = pattention(x, K, V, theta=theta)
    kept = pattention(x, grown_K, grown_V, theta=theta, scale_tokens=len(K))
    assert torch.allclose(kept, before, rtol=1e-12) == (theta != "softmax")
    # By default the scale follows the token count, and the output moves.
    assert not torch.allclose(pattention(x, grown_K, grown_V, theta=theta), before, atol=1e-3)


def test_gram_matrix_identities():
    """Design identities 1 and 2: a plain two-layer network on rescaled rows, and its backward."""
    x, K, V = (t.requires_grad_() for t in tensors(6, n=13))
    s = 4.5
    out = pattention(x, K, V, scale_tokens=s)
    slopes = torch.randn_like(out)
    dx, dK, dV = torch.autograd.grad((out * slopes).sum(), (x, K, V))

    x, K, V = (t.detach() for t in (x, K, V))
    gram = K.T @ K
    q = ((x @ gram) * x).sum(-1, keepdim=True)
    f = torch.sqrt(s / q)
    y, plain_K, plain_V = ((t.clone().requires_grad_()) for t in (x * f, K, V))
    plain = F.gelu(y @ plain_K.T) @ plain_V
    torch.testing.assert_close(out.detach(), plain.detach())
    dy, plain_dK, plain_dV = torch.autograd.grad((plain * slopes).sum(), (y, plain_K, plain_V))
    c = -(x * dy).sum(-1, keepdim=True) * f / (2 * q)
    torch.testing.assert_close(dx, f * dy + 2 * c * (x @ gram))
    torch.testing.assert_close(dK, plain_dK + 2 * K @ (x.T @ (c * x)))
    torch.testing.assert_close(dV, plain_dV)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("theta", THETAS)
def test_zero_rows(theta, dtype):
    x, K, V = tensors(4, dtype=dtype)
    x[2] = 0
    inputs = [t.requires_grad_() for t in (x, K, V)]
    out = pattention(x, K, V, theta=theta)
    expected = 7 * V.mean(0) if theta == "softmax" else torch.zeros_like(out[2])
    torch.testing.assert_close(out[2], expected, rtol=2e-2, atol=2e-2)
    gradients = torch.autograd.grad(out.sum(), inputs)
    for gradient, tensor in zip(gradients, inputs, strict=True):
        assert gradient.dtype == dtype
        assert gradient.isfinite().all()
        assert gradient.any()
        assert gradient.shape == tensor.shape
    assert gradients[0][2].any() == (theta == "softmax")


@pytest.mark.parametrize("theta", ["l2_gelu", "gelu_l2", "l1_gelu"])
def test_zero_keys_alone_give_zero_and_no_nan(theta):
    x, K, V = tensors(4)
    K = torch.zeros_like(K, requires_grad=True)
    out = pattention(x, K, V, theta=theta)
    out.sum().backward()
    assert not out.any()
    assert not K.grad.any()


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("leading", [(0,), (0, 3), (2, 0)])
def test_empty_batches(theta, leading):
    x, K, V = (t.requires_grad_() for t in tensors(*leading))
    out = pattention(x, K, V, theta=theta)
    assert out.shape == (*leading, 4)
    out.sum().backward()
    assert x.grad.shape == x.shape
    assert not K.grad.any()
    assert not V.grad.any()


def test_leading_dimensions_are_only_a_batch():
    x, K, V = tensors(2, 3, 4)
    out = pattention(x, K, V)
    one_by_one = torch.stack([pattention(row, K, V) for row in x.flatten(0, 2)])
    torch.testing.assert_close(out.flatten(0, 2), one_by_one)


def test_strided_inputs():
    x, K, V = tensors(6, 3)
    expected = pattention(x.transpose(0, 1).contiguous(), K, V)
    strided_K, strided_V = K.T.contiguous().T, V.T.contiguous().T
    assert not strided_K.is_contiguous()
    torch.testing.assert_close(pattention(x.transpose(0, 1), strided_K, strided_V), expected)


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
def test_tensor_scale_is_a_number(theta, shape):
    x, K, V = tensors(3)
    scale = torch.full(shape, 2.5, dtype=torch.float64, requires_grad=True)
    out = pattention(x, K, V, scale_tokens=scale, theta=theta)
    torch.testing.assert_close(out, pattention(x, K, V, scale_tokens=2.5, theta=theta))
    (gradient,) = torch.autograd.grad(out.sum(), scale)
    assert gradient.shape == shape
    assert gradient.any()


def test_wide_scale_tensor_does_not_widen_the_output():
    x, K, V = tensors(3, dtype=torch.bfloat16)
    for shape in ((), (1,)):
        scale = torch.full(shape, 2.5, dtype=torch.float64)
        assert pattention(x, K, V, scale_tokens=scale).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("x", "K", "V", "named"),
    [
        ((2, 5), (7, 4), (7, 3), r"d_in.*x \(2, 5\), key_tokens \(7, 4\)"),
        ((), (7, 4), (7, 3), r"x \(\)"),
        ((2, 4), (7, 4), (6, 3), r"number of tokens.*\(7, 4\).*value_tokens \(6, 3\)"),
        ((2, 4), (4,), (7, 3), r"key_tokens \(4,\)"),
        ((2, 4), (7, 4), (1, 7, 3), r"value_tokens \(1, 7, 3\)"),
        ((2, 4), (0, 4), (0, 3), r"at least one parameter token.*\(0, 4\)"),
    ],
)
def test_wrong_shapes_are_named(x, K, V, named):
    with pytest.raises(ValueError, match=named):
        pattention(torch.ones(x), torch.ones(K), torch.ones(V))


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"theta": "l3_gelu"}, "theta='l3_gelu'.*l2_gelu, gelu_l2, l1_gelu, softmax"),
        ({"approximate": "erf"}, "approximate='erf'.*none or tanh"),
        ({"backend": "magic"}, f"backend='magic'.*{', '.join(BACKENDS)}"),
        ({"scale_tokens": 0}, "scale_tokens=0 "),
        ({"scale_tokens": -2.0}, "scale_tokens=-2.0 "),
        ({"scale_tokens": math.inf}, "scale_tokens=inf "),
        ({"scale_tokens": math.nan}, "scale_tokens=nan "),
        ({"scale_tokens": torch.ones(7)}, r"scale_tokens.*\(7,\)"),
    ],
)
def test_wrong_options_are_named(option, named):
    with pytest.raises(ValueError, match=named):
        pattention(*tensors(3), **option)


def test_wrong_dtypes_are_named():
    x, K, V = tensors(3, dtype=torch.float32)
    with pytest.raises(TypeError, match=r"x is torch\.float32, key_tokens torch\.float64"):
        pattention(x, K.double(), V)
    with pytest.raises(TypeError, match=r"torch\.int64"):
        pattention(x.long(), K.long(), V.long())


@pytest.mark.parametrize("theta", THETAS)
def test_autocast_from_fp32_parameters(theta):
    x, K, V = (t.requires_grad_() for t in tensors(16, d_in=32, n=64, dtype=torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = pattention(x, K, V, theta=theta)
        mixed = pattention(x.bfloat16(), K, V, theta=theta)
    assert out.dtype == torch.bfloat16
    assert torch.equal(mixed, out)
    out.float().square().mean().backward()
    assert K.grad.dtype == V.grad.dtype == torch.float32
    assert K.grad.isfinite().all()
    expected = pattention(x, K, V, theta=theta)
    # bf16 keeps about three digits of the scores, which softmax turns into relative errors.
    assert (out - expected).norm() / expected.norm() < (0.1 if theta == "softmax" else 0.02)


@pytest.mark.parametrize("theta", THETAS)
def test_function_transforms(theta):
    x, K, V = tensors(3)

    def call(x, K, V):
        return pattention(x, K, V, theta=theta)

    batched = torch.func.vmap(call, in_dims=(0, None, None))(x, K, V)
    torch.testing.assert_close(batched, call(x, K, V))

    ensemble_K, ensemble_V = torch.stack((K, -K)), torch.stack((V, 2 * V))
    ensemble = torch.func.vmap(call, in_dims=(None, 0, 0))(x, ensemble_K, ensemble_V)
    torch.testing.assert_close(ensemble, torch.stack((call(x, K, V), call(x, -K, 2 * V))))

    expected = torch.autograd.functional.jacobian(lambda x: call(x, K, V), x[0])
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(transform(call)(x[0], K, V), expected)
    per_sample = torch.func.vmap(torch.func.jacrev(call, argnums=1), in_dims=(0, None, None))
    assert per_sample(x, K, V).shape == (3, 4, 7, 5)


@pytest.mark.parametrize("theta", THETAS)
def test_compiles_without_a_graph_break(theta):
    torch._dynamo.reset()
    compiled = torch.compile(pattention, fullgraph=True, backend="eager")
    x, K, V = (t.requires_grad_() for t in tensors(2, 3))
    out = compiled(x, K, V, theta=theta)
    expected = pattention(x, K, V, theta=theta)
    torch.testing.assert_close(out, expected)
    gradients = (torch.autograd.grad(y.sum(), (x, K, V)) for y in (out, expected))
    torch.testing.assert_close(*gradients)


def test_moving_scale_does_not_recompile():
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(pattention, fullgraph=True, backend=counter)
    x, K, V = tensors(3)
    for scale in (7.0, 8.5, 10.0, 11.25):
        moving = torch.tensor(scale, dtype=torch.float64)
        out = compiled(x, K, V, scale_tokens=moving)
        torch.testing.assert_close(out, pattention(x, K, V, scale_tokens=scale))
    assert counter.frame_count == 1


def test_different_float_scales_compile():
    # The second value makes the float symbolic, which the checks of the options must survive.
    torch._dynamo.reset()
    compiled = torch.compile(pattention, fullgraph=True, backend="eager")
    x, K, V = tensors(3)
    for scale in (7.0, 8.5, 10.0):
        out = compiled(x, K, V, scale_tokens=scale)
        torch.testing.assert_close(out, pattention(x, K, V, scale_tokens=scale))


def test_batch_sizes_share_one_dynamic_graph():
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(pattention, fullgraph=True, backend=counter, dynamic=True)
    _, K, V = tensors()
    for batch in (2, 3, 5, 8):
        x = torch.randn(batch, 5, dtype=torch.float64)
        torch.testing.assert_close(compiled(x, K, V), pattention(x, K, V))
    assert counter.frame_count == 1
