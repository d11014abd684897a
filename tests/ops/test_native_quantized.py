"""Native code for quantized tokens against their dequantized numbers.

Rows and weights are rounded to int16; `assert_near` allows for just that.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokenformer.layers import Pattention
from tokenformer.layers.int8 import Int8Pattention, dequantize, quantize
from tokenformer.ops import THETAS, pattention
from tokenformer.ops.backends.native import few_rows
from tokenformer.ops.backends.native import library as building
from tokenformer.ops.backends.native.library import library

needs_compiler = pytest.mark.skipif(library() is None, reason="no C++ compiler")
STEPS = 32767
"""The largest int16."""
ROUNDING = torch.finfo(torch.float32).eps


@pytest.fixture(params=["instructions", "portable"], scope="module")
def build(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[str]:
    """The library as it is for this processor, and without instructions of its own."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "portable":
            patch.setattr(building, "FLAGS", [*building.FLAGS, "-DPORTABLE"])
            patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("portable")))
            built = library.__wrapped__()
            patch.setattr(building, "library", lambda: built)
            patch.setattr(few_rows, "function", building.function.__wrapped__)
        yield request.param


@pytest.fixture(params=[1, 3], autouse=True)
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """One thread, and three: more than some shapes have tokens."""
    monkeypatch.setattr(few_rows, "threads_for", lambda size: request.param)
    with torch.no_grad():
        yield request.param


def random_layer(d_in: int, n: int, d_out: int, **options: Any) -> Pattention:
    layer = Pattention(d_in, d_out, n, **options)
    for tokens in (layer.key_tokens, layer.value_tokens):
        tokens.data.normal_().mul_(torch.rand(n, 1) + 0.1)
    return layer


def run(layer: Int8Pattention, x: Tensor) -> Tensor:
    assert few_rows.supports(x, layer.key_tokens, layer.value_tokens)
    return layer(x)


def assert_near(found: Tensor, x: Tensor, layer: Int8Pattention) -> None:
    """Within half a step of every number that is rounded, and some roundings of fp32; or as near to
    float64 as the plain formula in fp32."""
    keys = dequantize(layer.key_tokens, layer.key_scales, torch.float64)
    values = dequantize(layer.value_tokens, layer.value_scales, torch.float64)
    options = (layer.scale_tokens, layer.approximate, layer.eps)

    def weights(scores: Tensor) -> Tensor:
        return THETAS[layer.theta](scores, *options)

    assert found.dtype == x.dtype
    x = x.double()
    scores, step = x @ keys.T, x.abs().amax(-1, keepdim=True) / STEPS
    slack = 0.5 * step * keys.abs().sum(1) + 8 * ROUNDING * (x.abs() @ keys.abs().T)
    exact = weights(scores)
    moved = sum((weights(scores + d) - exact).abs() @ values.abs() for d in (slack, -slack))
    largest = (exact.abs() * layer.value_scales).amax(-1, keepdim=True)
    rounded = largest / STEPS * layer.value_tokens.abs().double().sum(0)
    # GELU has as many digits after the point as its input, and the exponentials of a softmax as
    # many as the largest score has left.
    size = exact.abs() + 1 if layer.theta != "softmax" else exact
    summed = 16 * ROUNDING * (size @ values.abs())
    if layer.theta == "softmax":
        summed += 2 * slack.amax(-1, keepdim=True) * (exact @ values.abs())
    truth = exact @ values
    last = torch.finfo(found.dtype).eps * truth.abs()
    plain = THETAS[layer.theta]((x @ keys.T).float(), *options).double() @ values
    error, usual = ((t.double() - truth).abs() for t in (found, plain))
    assert (error <= 1.5 * (moved + rounded + summed + last) + 2 * usual.max()).all(), error.max()


@needs_compiler
@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(1, 17) | st.just(few_rows.MAX_INT8_ROWS),
    d_in=st.integers(1, 140),
    n=st.integers(1, 300),
    d_out=st.integers(1, 140),
    seed=st.integers(0, 2**16),
    theta=st.sampled_from(list(THETAS)),
    approximate=st.sampled_from(["none", "tanh"]),
    eps=st.sampled_from([0.0, 1e-2]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_odd_shapes(build, rows, d_in, n, d_out, seed, theta, approximate, eps, dtype):
    torch.manual_seed(seed)
    layer = Int8Pattention(
        random_layer(d_in, n, d_out, theta=theta, approximate=approximate, eps=eps)
    )
    x = torch.randn(rows, d_in).to(dtype)
    assert_near(run(layer, x), x, layer)


@needs_compiler
def test_wide_layers(build):
    torch.manual_seed(0)
    layer = Int8Pattention(random_layer(9000, 40, 3000))
    x = torch.randn(2, 9000)
    assert_near(run(layer, x), x, layer)


@needs_compiler
def test_sums_do_not_overflow(build):
    """The largest numbers in all places."""
    layer = Int8Pattention(random_layer(20_000, 3000, 20, theta="softmax"))
    layer.key_tokens.fill_(127)
    layer.value_tokens.fill_(-127)
    layer.key_scales.fill_(1e-6)
    layer.value_scales.fill_(1)
    x = torch.ones(1, 20_000)
    torch.testing.assert_close(run(layer, x), torch.full((1, 20), -127.0 * 3000))
    logits = few_rows.linear(x, layer.key_tokens, layer.key_scales)
    torch.testing.assert_close(logits, torch.full((1, 3000), 127 * 20_000 * 1e-6))


@needs_compiler
@pytest.mark.parametrize("theta", list(THETAS))
def test_zero_rows_and_nan(build, theta):
    torch.manual_seed(0)
    layer = Int8Pattention(random_layer(60, 90, 33, theta=theta))
    x = torch.randn(6, 60)
    x[1] = 0
    assert_near(run(layer, x), x, layer)
    x[2, 3], x[4, 0] = torch.nan, torch.inf
    assert run(layer, x).isnan().all(-1).tolist() == [False, False, True, False, True, False]


@needs_compiler
def test_rows_do_not_depend_on_each_other(build):
    torch.manual_seed(0)
    layer, x = Int8Pattention(random_layer(100, 200, 70)), torch.randn(21, 100)
    alone = torch.cat([run(layer, row[None]) for row in x])
    assert torch.equal(run(layer, x), alone)


@needs_compiler
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("shape", [(33, 70), (5, 1), (64, 4100), (1, 32)])
def test_a_matrix_in_integers(build, rows, shape):
    """The integers are exact; only their scaling is rounded."""
    torch.manual_seed(0)
    weight, scales = quantize(torch.randn(shape))
    x = torch.randn(rows, shape[1])
    steps = x.abs().amax(-1, keepdim=True) / STEPS
    numbers = (x * (1 / steps)).round()
    wanted = (numbers.double() @ weight.double().T) * steps.double() * scales.double()
    slack = 4 * ROUNDING * (numbers.double().abs() @ weight.double().abs().T) * steps * scales
    found = few_rows.linear(x, weight, scales)
    assert ((found.double() - wanted).abs() <= slack).all()


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_rows_costs_little(build, dtype):
    """Against the rounding error of the tokens."""
    torch.manual_seed(0)
    exact = random_layer(256, 512, 256)
    layer, x = Int8Pattention(exact), torch.randn(4, 256).to(dtype)
    inputs = x.double(), exact.key_tokens.double(), exact.value_tokens.double()
    truth = pattention(*inputs, backend="reference")
    keys = dequantize(layer.key_tokens, layer.key_scales, torch.float64)
    values = dequantize(layer.value_tokens, layer.value_scales, torch.float64)
    wanted = pattention(x.double(), keys, values, backend="reference")
    error = (run(layer, x).double() - wanted).norm()
    assert error < (0.5 if dtype == torch.bfloat16 else 0.02) * (wanted - truth).norm()
