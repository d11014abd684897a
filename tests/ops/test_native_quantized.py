"""Native code for quantized tokens against their dequantized numbers.

Rows and weights are rounded too, to int16 for int8 tokens and to int8 for 4-bit tokens;
`assert_near` allows for just that.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokenformer.layers import Pattention, RoutedPattention
from tokenformer.layers.int4 import GROUP, Int4Pattention
from tokenformer.layers.int8 import Int8Pattention, quantize
from tokenformer.layers.quantized import QuantizedPattention
from tokenformer.layers.quantized_routing import RoutedInt4Pattention, RoutedInt8Pattention
from tokenformer.ops import THETAS, pattention
from tokenformer.ops.backends.native import few_rows
from tokenformer.ops.backends.native import library as building
from tokenformer.ops.backends.native.library import library

needs_compiler = pytest.mark.skipif(library() is None, reason="no C++ compiler")
both = pytest.mark.parametrize("kind", [Int8Pattention, Int4Pattention])
INT8, INT16 = 127, 32767
"""The largest numbers."""
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


def run(layer: QuantizedPattention, x: Tensor) -> Tensor:
    assert layer.supports_native(x)
    return layer(x)


def largest_of_groups(numbers: Tensor) -> Tensor:
    """Repeat the largest absolute value of every 32 numbers of a row."""
    groups = F.pad(numbers.abs(), (0, -numbers.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    largest = groups.amax(-1, keepdim=True).expand_as(groups).flatten(-2)
    return largest[..., : numbers.shape[-1]]


def steps_of(layer: QuantizedPattention, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """What rows and weights are rounded to multiples of, at most."""
    if isinstance(layer, Int4Pattention):
        return largest_of_groups(x) / INT8, largest_of_groups(weights) / INT8
    scales = layer.value_scales.double()
    largest = (weights * scales).abs().amax(-1, keepdim=True)
    return x.abs().amax(-1, keepdim=True).expand_as(x) / INT16, largest / scales / INT16


def assert_near(found: Tensor, x: Tensor, layer: QuantizedPattention) -> None:
    """Within half a step of every number that is rounded, and some roundings of fp32; or as near to
    float64 as the plain formula in fp32."""
    keys, values = layer.dequantized(torch.float64)
    options = (layer.scale_tokens, layer.approximate, layer.eps)

    def weights(scores: Tensor) -> Tensor:
        return THETAS[layer.theta](scores, *options)

    assert found.dtype == x.dtype
    x = x.double()
    scores = x @ keys.T
    exact = weights(scores)
    step, weight_step = steps_of(layer, x, exact)
    slack = (0.5 * step + 8 * ROUNDING * x.abs()) @ keys.abs().T
    moved = sum((weights(scores + d) - exact).abs() @ values.abs() for d in (slack, -slack))
    # GELU has as many digits after the point as its input, and the exponentials of a softmax as
    # many as the largest score has left.
    size = exact.abs() + 1 if layer.theta != "softmax" else exact
    summed = (weight_step + 16 * ROUNDING * size) @ values.abs()
    if layer.theta == "softmax":
        summed += 2 * slack.amax(-1, keepdim=True) * (exact @ values.abs())
    truth = exact @ values
    last = torch.finfo(found.dtype).eps * truth.abs()
    plain = THETAS[layer.theta](scores.float(), *options).double() @ values
    error, usual = ((t.double() - truth).abs() for t in (found, plain))
    assert (error <= 1.5 * (moved + summed + last) + 2 * usual.max()).all(), error.max()


@needs_compiler
@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from([Int8Pattention, Int4Pattention]),
    rows=st.integers(1, 17) | st.just(few_rows.MAX_QUANTIZED_ROWS),
    d_in=st.integers(1, 300),
    n=st.integers(1, 300),
    d_out=st.integers(1, 140),
    seed=st.integers(0, 2**16),
    theta=st.sampled_from(list(THETAS)),
    approximate=st.sampled_from(["none", "tanh"]),
    eps=st.sampled_from([0.0, 1e-2]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_odd_shapes(build, kind, rows, d_in, n, d_out, seed, theta, approximate, eps, dtype):
    torch.manual_seed(seed)
    layer = kind(random_layer(d_in, n, d_out, theta=theta, approximate=approximate, eps=eps))
    x = torch.randn(rows, d_in).to(dtype)
    assert_near(run(layer, x), x, layer)


@needs_compiler
@both
def test_wide_layers(build, kind):
    torch.manual_seed(0)
    layer = kind(random_layer(9000, 40, 3000))
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
@both
@pytest.mark.parametrize("theta", list(THETAS))
def test_zero_rows_and_nan(build, kind, theta):
    torch.manual_seed(0)
    layer = kind(random_layer(60, 90, 33, theta=theta))
    x = torch.randn(6, 60)
    x[1] = 0
    assert_near(run(layer, x), x, layer)
    x[2, 3], x[4, 0] = torch.nan, torch.inf
    assert run(layer, x).isnan().all(-1).tolist() == [False, False, True, False, True, False]


@needs_compiler
@both
def test_rows_do_not_depend_on_each_other(build, kind):
    torch.manual_seed(0)
    layer, x = kind(random_layer(100, 200, 70)), torch.randn(21, 100)
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
    steps = x.abs().amax(-1, keepdim=True) / INT16
    numbers = (x * (1 / steps)).round()
    wanted = (numbers.double() @ weight.double().T) * steps.double() * scales.double()
    slack = 4 * ROUNDING * (numbers.double().abs() @ weight.double().abs().T) * steps * scales
    found = few_rows.linear(x, weight, scales)
    assert ((found.double() - wanted).abs() <= slack).all()


@needs_compiler
@pytest.mark.parametrize("shape", [(300, 50, 70), (768, 192, 128), (31, 33, 7)])
@pytest.mark.parametrize("rows", [1, 6])
def test_4_bit_tokens_in_integers(build, shape, rows):
    """The same with rows and weights rounded in torch, where few weights are rounded otherwise."""
    torch.manual_seed(0)
    layer, x = Int4Pattention(random_layer(*shape)), torch.randn(rows, shape[0])
    keys, values = layer.dequantized(torch.float64)

    def rounded(numbers: Tensor) -> Tensor:
        steps = largest_of_groups(numbers) / INT8
        return (numbers / steps).round().double() * steps.double()

    weights = THETAS["l2_gelu"](rounded(x) @ keys.T, layer.scale_tokens, "none", layer.eps)
    wanted = rounded(weights) @ values
    assert (run(layer, x) - wanted).norm() < 3e-4 * wanted.norm()
    exact = pattention(x.double(), keys, values, backend="reference")
    assert (exact - wanted).norm() > 2e-3 * wanted.norm(), "rounding makes a difference"


@needs_compiler
@pytest.mark.parametrize(("kind", "share"), [(Int8Pattention, 0.02), (Int4Pattention, 0.1)])
def test_rounding_rows_costs_little(build, kind, share):
    """Against the rounding error of the tokens."""
    torch.manual_seed(0)
    exact = random_layer(256, 512, 256)
    layer, x = kind(exact), torch.randn(4, 256)
    inputs = x.double(), exact.key_tokens.double(), exact.value_tokens.double()
    truth = pattention(*inputs, backend="reference")
    wanted = pattention(x.double(), *layer.dequantized(torch.float64), backend="reference")
    assert (run(layer, x).double() - wanted).norm() < share * (wanted - truth).norm()


@needs_compiler
@both
@pytest.mark.parametrize("rows", [1, 3, 16, 40])
@pytest.mark.parametrize(("theta", "norm"), [("l2_gelu", "all"), ("softmax", "chosen")])
def test_routed_layers(build, kind, rows, theta, norm):
    """Against the dequantized tokens of the same groups."""
    torch.manual_seed(0)
    routed = RoutedInt8Pattention if kind is Int8Pattention else RoutedInt4Pattention
    share = 1e-3 if kind is Int8Pattention else 0.05
    for n, size, k in [(300, 32, 5), (301, 32, 10), (200, 64, 1), (20, 32, 1), (99, 32, 0)]:
        options = {"group_size": size, "active_groups": k, "norm": norm, "theta": theta}
        exact = RoutedPattention(70, 33, n, **options, bias=True)
        exact.router.bias.normal_()
        exact.bias.data.normal_()
        layer, x = routed(exact), torch.randn(rows, 70)
        found, wanted = run(layer, x), layer.attend(x.double())
        assert (found - wanted).norm() <= share * wanted.norm()
        groups, gates = layer.router(x, None, k)
        scores = exact.router.scores(exact.router.normalized(x), None).gather(1, groups)
        torch.testing.assert_close(gates, 2 * scores.sigmoid(), rtol=0, atol=0.02)
