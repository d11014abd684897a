"""Every backend against the reference: values and gradients."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support.backends import (
    assert_as_accurate,
    assert_close,
    output_and_gradients,
    random_inputs,
)
from tokenformer.ops import BACKENDS, THETAS, pattention
from tokenformer.ops.backends import auto, derivatives, saved_bytes, single_row, streamed
from tokenformer.ops.backends.autograd import KERNELS
from tokenformer.ops.backends.interface import Sizes

# Two have tests of their own: the one without gradients and the one for GPUs.
FAST = [name for name in BACKENDS if name not in ("reference", "native", "triton")]
backends = pytest.mark.parametrize("backend", FAST)
thetas = pytest.mark.parametrize("theta", list(THETAS))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of rows and chunks of tokens far smaller than the inputs below."""
    monkeypatch.setattr(derivatives, "PRODUCT_ROWS", 11)
    monkeypatch.setattr(derivatives, "CACHE_BYTES", 0)
    monkeypatch.setattr(streamed, "FEWEST_TOKENS", 4)
    monkeypatch.setattr(streamed, "CHUNK_BYTES", 0)
    monkeypatch.setattr(single_row, "LEAST_BYTES", 0)


@settings(max_examples=150, deadline=None)
@given(
    leading=st.lists(st.integers(0, 5), max_size=3),
    d_in=st.integers(1, 6),
    n=st.integers(1, 20),
    d_out=st.integers(1, 5),
    seed=st.integers(0, 2**16),
    theta=st.sampled_from(list(THETAS)),
    approximate=st.sampled_from(["none", "tanh"]),
    scale=st.none() | st.floats(0.5, 100.0),
    eps=st.sampled_from([0.0, 1e-2]),
    backend=st.sampled_from(FAST),
)
def test_odd_shapes(leading, d_in, n, d_out, seed, theta, approximate, scale, eps, backend):
    inputs = random_inputs((*leading, d_in), (n, d_in), (n, d_out), seed=seed)
    options = {"scale_tokens": scale, "theta": theta, "approximate": approximate, "eps": eps}
    wanted = output_and_gradients("reference", inputs, **options)
    # One score of l1_gelu near zero has a gradient that jumps; a sum of few may cancel.
    assert_close(output_and_gradients(backend, inputs, **options), wanted, 1e-9)


@backends
@thetas
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [3, 40])
def test_dtypes(backend, theta, dtype, rows):
    inputs = random_inputs((rows, 16), (50, 16), (50, 8), dtype=dtype)
    assert_as_accurate(backend, inputs, theta=theta)


@backends
@thetas
def test_a_scale_that_is_learned(backend, theta):
    inputs = random_inputs((10, 6), (30, 6), (30, 5))
    scale = torch.tensor([11.0], dtype=torch.float64, requires_grad=True)
    options = {"theta": theta, "scale_tokens": scale, "eps": 1e-3}
    assert_close(
        output_and_gradients(backend, inputs, **options),
        output_and_gradients("reference", inputs, **options),
        1e-11,
    )


@backends
@thetas
def test_zero_rows_and_zero_keys(backend, theta):
    inputs = random_inputs((12, 6), (30, 6), (30, 5), dtype=torch.float32)
    with torch.no_grad():
        inputs[0][3] = 0
        inputs[1][10:] = 0
    found = output_and_gradients(backend, inputs, theta=theta)
    assert all(tensor.isfinite().all() for tensor in found)
    assert_close(found, output_and_gradients("reference", inputs, theta=theta), 2e-6)


@backends
def test_strides_and_many_tokens(backend):
    x, keys, values = random_inputs((8, 3, 14), (6, 3000), (9, 3000))
    inputs = [x.transpose(0, 1)[..., ::2][..., :6], keys.T, values.T]
    wanted = pattention(*inputs, backend="reference")
    assert_close([pattention(*inputs, backend=backend)], [wanted], 1e-12)
    grads = [
        torch.autograd.grad(pattention(*inputs, backend=name).sum(), (x, keys, values))
        for name in (backend, "reference")
    ]
    assert_close(list(grads[0]), list(grads[1]), 1e-11)


@backends
def test_softmax_of_large_scores(backend):
    """All scores of a row are near a thousand: what tells the tokens apart are the last digits."""
    x, keys, values = random_inputs((16, 12), (40, 12), (40, 8), dtype=torch.float32)
    with torch.no_grad():
        keys += 1000 / 12
        x.abs_()
    inputs = [x, keys, values]
    truth = output_and_gradients(
        "reference", [t.detach().double().requires_grad_() for t in inputs], theta="softmax"
    )
    plain = output_and_gradients("reference", inputs, theta="softmax")
    for one, other, true in zip(
        output_and_gradients(backend, inputs, theta="softmax"), plain, truth, strict=True
    ):
        error, usual = ((t.double() - true).norm() for t in (one, other))
        assert error <= 3 * usual, "no worse than the plain formula"


@backends
@pytest.mark.parametrize("dominance", [1e2, 1e4])
def test_keys_with_one_direction_that_dominates(backend, dominance):
    """Half of the rows hardly see it: their norm is what the rest of the keys leave."""
    x, keys, values = random_inputs((64, 16), (80, 16), (80, 8), dtype=torch.float32)
    with torch.no_grad():
        direction = torch.nn.functional.normalize(torch.randn(16), dim=0)
        keys += dominance * torch.randn(80, 1) * direction
        x[:32] -= (x[:32] @ direction)[:, None] * direction
    inputs = [x, keys, values]
    truth = output_and_gradients(
        "reference", [t.detach().double().requires_grad_() for t in inputs]
    )
    plain = output_and_gradients("reference", inputs)
    for one, other, true in zip(output_and_gradients(backend, inputs), plain, truth, strict=True):
        error, usual = ((t.double() - true).norm() for t in (one, other))
        assert error <= 3 * usual + 1e-5 * true.norm(), "no worse than the norm of the scores"


@backends
def test_rows_that_no_key_sees(backend):
    """Fewer keys than channels: the null space is exactly zero, also for the Gram matrix."""
    x, keys, values = random_inputs((40, 16), (8, 16), (8, 5), dtype=torch.float32)
    with torch.no_grad():
        keys[:, 10:] = 0
        x[:20, :10] = 0
    found = output_and_gradients(backend, [x, keys, values])
    assert (found[0][:20] == 0).all()
    assert (found[1][:20] == 0).all()
    assert_close(found, output_and_gradients("reference", [x, keys, values]), 3e-6)


@pytest.mark.parametrize("tokens", [1, 7, 30, 48])
def test_one_row_in_parts(tokens):
    x, keys, values = random_inputs((1, 1, 6), (tokens, 6), (tokens, 5))
    assert single_row.parts_of(x, keys, values) == {1: 1, 7: 7, 30: 15, 48: 16}[tokens]
    assert single_row.parts_of(x.expand(2, 1, 6), keys, values) == 1
    wanted = output_and_gradients("reference", [x, keys, values])
    assert_close(output_and_gradients("single_row", [x, keys, values]), wanted, 1e-12)


@backends
@thetas
def test_gradients_of_gradients(backend, theta):
    inputs = random_inputs((4, 3), (7, 3), (7, 2))
    scale = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)

    def penalty(name: str) -> tuple[Tensor, ...]:
        out = pattention(*inputs, scale_tokens=scale, theta=theta, backend=name)
        first = torch.autograd.grad(out.square().sum(), [*inputs, scale], create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), [*inputs, scale])

    assert_close(list(penalty(backend)), list(penalty("reference")), 1e-9)


@backends
@thetas
def test_autocast_and_checkpointing(backend, theta):
    inputs = random_inputs((10, 6), (30, 6), (30, 5), dtype=torch.float32)

    def grads(name: str) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            out = checkpoint(
                lambda *t: pattention(*t, theta=theta, backend=name), *inputs, use_reentrant=False
            )
            assert out.dtype == torch.bfloat16
        return list(torch.autograd.grad(out.float().sum(), inputs))

    assert_close(grads(backend), grads("reference"), 0.05)


@backends
def test_without_gradients_nothing_is_recorded(backend):
    inputs = random_inputs((5, 4), (9, 4), (9, 3))
    with torch.no_grad():
        out = pattention(*inputs, backend=backend)
    assert not out.requires_grad
    with torch.inference_mode():
        assert torch.allclose(pattention(*inputs, backend=backend), out)
    frozen = [inputs[0].detach(), *inputs[1:]]
    assert pattention(*frozen, backend=backend).requires_grad


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "theta"), list(itertools.product(FAST, THETAS)))
def test_compiles_whole_with_gradients(backend, theta):
    torch._dynamo.reset()
    inputs = random_inputs((10, 6), (30, 6), (30, 5))
    scale = torch.tensor(11.0, dtype=torch.float64, requires_grad=True)

    def layer(x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return 2 * pattention(
            x, keys, values, theta=theta, backend=backend, eps=1e-3, scale_tokens=scale
        )

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found, wanted = (
        torch.autograd.grad(function(*inputs).square().sum(), [*inputs, scale])
        for function in (compiled, layer)
    )
    assert_close(list(found), list(wanted), 1e-12)


def test_registered_operators_keep_their_promises():
    for theta, kernel in itertools.product(THETAS, set(KERNELS) & set(FAST)):
        inputs = random_inputs((5, 4), (9, 4), (9, 3), dtype=torch.float32)
        scale = torch.tensor(9.0, requires_grad=True)
        arguments = (*inputs, scale, kernel, theta, "none", 1e-3)
        torch.library.opcheck(torch.ops.tokenformer.pattention.default, arguments)


def test_streaming_keeps_nothing_of_the_size_of_the_scores():
    rows, tokens, width = 64, 4096, 8
    inputs = random_inputs((rows, width), (tokens, width), (tokens, width), dtype=torch.float32)
    own = {tensor.data_ptr() for tensor in inputs}

    def kept_by(name: str) -> int:
        sizes: list[int] = []

        def note(tensor: Tensor) -> Tensor:
            sizes.append(0 if tensor.data_ptr() in own else tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            pattention(*inputs, backend=name)
        return sum(sizes)

    sizes = {name: kept_by(name) for name in ("reference", *FAST)}
    assert sizes["direct"] <= rows * tokens + 4 * rows
    assert sizes["streamed"] <= 4 * rows * width
    assert sizes["reference"] >= 3 * rows * tokens


@thetas
@pytest.mark.parametrize("kernel", sorted(set(KERNELS) & set(FAST)))
@pytest.mark.parametrize("rows", [5, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_bytes_are_what_autograd_saves(theta, kernel, rows, dtype):
    inputs = random_inputs((rows, 8), (40, 8), (40, 6), dtype=dtype)
    own = {tensor.data_ptr() for tensor in inputs}
    saved: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            saved[id(tensor)] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        pattention(*inputs, theta=theta, backend=kernel)
    total = sum(tensor.numel() * tensor.itemsize for tensor in saved.values())
    assert saved_bytes(kernel, theta, Sizes(rows, 8, 40, 6), dtype) == total


def test_auto_chooses_by_shape_and_need(monkeypatch):
    def chosen(rows: int, *, trained: bool = True, device: str = "cpu") -> str:
        x, keys, values = (
            torch.randn(shape, device=device) for shape in ((rows, 4), (9, 4), (9, 3))
        )
        return auto.choose(x, keys.requires_grad_(trained), values, 9.0)

    assert chosen(1) == "single_row"
    assert chosen(2) == "reference"
    assert chosen(100) == "direct"
    assert chosen(100, trained=False) == "direct"
    assert chosen(100, device="meta") == "reference"
    monkeypatch.setattr(auto, "MAX_SCORE_BYTES", 100 * 9 * 4 - 1)
    assert chosen(100) == "streamed"
    assert chosen(100, trained=False) == "direct", "which then keeps nothing either"
    with torch.no_grad():
        assert chosen(100) == "direct"


@thetas
def test_auto_under_transforms(theta, monkeypatch):
    monkeypatch.setattr(auto, "FEW_ROWS", 0)
    x, keys, values = (t.detach() for t in random_inputs((3, 5), (7, 5), (7, 4)))

    def call(x: Tensor) -> Tensor:
        return pattention(x, keys, values, theta=theta)

    expected = torch.autograd.functional.jacobian(call, x[0])
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(transform(call)(x[0]), expected)
    tangent = torch.ones_like(x[0])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x[0], tangent)
        found = torch.autograd.forward_ad.unpack_dual(call(dual)).tangent
    torch.testing.assert_close(found, expected @ tangent)
