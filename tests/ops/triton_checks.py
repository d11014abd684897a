"""The backend `triton` against the reference: values and gradients.

Without a GPU its kernels run in Triton's interpreter, which must be switched on before triton is
imported; `test_triton.py` therefore runs this file in a process of its own. With a GPU:

    pytest tests/ops/triton_checks.py

The interpreter cuts bf16 off where a GPU rounds it, which the tolerances allow for.
"""

import os

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support.backends import (
    assert_as_accurate,
    assert_close,
    output_and_gradients,
    random_inputs,
)
from tokenformer.ops import THETAS, pattention
from tokenformer.ops.backends import triton

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
FLOAT = {"dtype": torch.float32, "device": DEVICE}

thetas = pytest.mark.parametrize("theta", list(THETAS))
gelus = pytest.mark.parametrize("approximate", ["none", "tanh"])


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles smaller than the inputs below, in every direction."""
    for side in ("BLOCK_ROWS", "BLOCK_TOKENS"):
        monkeypatch.setattr(triton, side, triton.SMALLEST)
    for width in ("INNER_BYTES", "OUTER_BYTES"):
        monkeypatch.setattr(triton, width, 0)


def one_number(value: float) -> Tensor:
    return torch.tensor([value], device=DEVICE, requires_grad=True)


def assert_equal(inputs: list[Tensor], **options: object) -> None:
    wanted = output_and_gradients("reference", inputs, **options)
    assert_close(output_and_gradients("triton", inputs, **options), wanted, 5e-6)


@thetas
@gelus
@pytest.mark.usefixtures("small_tiles")
def test_values_and_gradients(theta, approximate):
    inputs = random_inputs((3, 7, 19), (37, 19), (37, 35), **FLOAT)
    assert_equal(
        inputs, theta=theta, approximate=approximate, eps=1e-2, scale_tokens=one_number(11.0)
    )


@thetas
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("rows", "tokens", "d_in", "d_out"),
    [(1, 1, 1, 1), (0, 5, 3, 2), (16, 32, 16, 16), (33, 9, 5, 33), (2, 33, 40, 3)],
)
def test_odd_shapes(theta, rows, tokens, d_in, d_out):
    inputs = random_inputs((rows, d_in), (tokens, d_in), (tokens, d_out), **FLOAT)
    assert_equal(inputs, theta=theta)


@thetas
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tiles_as_they_are(theta, dtype):
    inputs = random_inputs((70, 140), (130, 140), (130, 300), dtype=dtype, device=DEVICE)
    assert_as_accurate("triton", inputs, theta=theta)


@thetas
@gelus
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(theta, approximate, dtype):
    inputs = random_inputs((20, 24), (40, 24), (40, 18), dtype=dtype, device=DEVICE)
    assert_as_accurate("triton", inputs, theta=theta, approximate=approximate)


@thetas
@gelus
@pytest.mark.usefixtures("small_tiles")
def test_zero_rows_and_zero_keys(theta, approximate):
    inputs = random_inputs((20, 6), (30, 6), (30, 5), **FLOAT)
    with torch.no_grad():
        inputs[0][3] = 0
        inputs[1][10:] = 0
    found = output_and_gradients("triton", inputs, theta=theta, approximate=approximate)
    assert all(tensor.isfinite().all() for tensor in found)
    if theta != "softmax":
        assert (found[0][3] == 0).all()
        assert (found[1][3] == 0).all()
    assert_close(
        found, output_and_gradients("reference", inputs, theta=theta, approximate=approximate), 2e-6
    )


@thetas
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.usefixtures("small_tiles")
def test_large_scores(theta, sign):
    """Beyond what exp can hold: no token beyond the last may weigh anything."""
    inputs = random_inputs((5, 8), (21, 8), (21, 3), **FLOAT)
    with torch.no_grad():
        inputs[0].abs_().mul_(sign)
        inputs[1].abs_().add_(30)
    assert_as_accurate("triton", inputs, theta=theta)


@pytest.mark.usefixtures("small_tiles")
def test_keys_with_one_direction_that_dominates():
    x, keys, values = random_inputs((32, 16), (40, 16), (40, 8), **FLOAT)
    with torch.no_grad():
        direction = torch.nn.functional.normalize(x[0], dim=0)
        torch.manual_seed(0)
        keys += 1e4 * torch.randn(40, 1, device=DEVICE) * direction
        x[:16] -= (x[:16] @ direction)[:, None] * direction
    assert_as_accurate("triton", [x, keys, values])


@thetas
@pytest.mark.usefixtures("small_tiles")
def test_strides(theta):
    x, keys, values = random_inputs((8, 3, 40), (20, 37), (18, 37), **FLOAT)

    def grads(name: str) -> list[Tensor]:
        out = pattention(x.transpose(0, 1)[..., ::2], keys.T, values.T, theta=theta, backend=name)
        return [out, *torch.autograd.grad(out.transpose(0, 1).square().sum(), (x, keys, values))]

    assert_close(grads("triton"), grads("reference"), 5e-6)


@pytest.mark.usefixtures("small_tiles")
def test_the_same_bits_each_time():
    inputs = random_inputs((40, 20), (50, 20), (50, 20), **FLOAT)
    once, again = (output_and_gradients("triton", inputs) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))


@thetas
@pytest.mark.usefixtures("small_tiles")
def test_gradients_of_gradients(theta):
    inputs = random_inputs((4, 3), (7, 3), (7, 2), **FLOAT)
    scale = one_number(5.0)

    def penalty(name: str) -> list[Tensor]:
        out = pattention(*inputs, scale_tokens=scale, theta=theta, backend=name)
        first = torch.autograd.grad(out.square().sum(), [*inputs, scale], create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), [*inputs, scale]))

    assert_close(penalty("triton"), penalty("reference"), 1e-4)


@thetas
@pytest.mark.usefixtures("small_tiles")
def test_autocast_and_checkpointing(theta):
    inputs = random_inputs((10, 6), (30, 6), (30, 5), **FLOAT)

    def grads(name: str) -> list[Tensor]:
        with torch.autocast(DEVICE, torch.bfloat16):
            out = checkpoint(
                lambda *t: pattention(*t, theta=theta, backend=name), *inputs, use_reentrant=False
            )
            assert out.dtype == torch.bfloat16
        return list(torch.autograd.grad(out.float().sum(), inputs))

    assert_close(grads("triton"), grads("reference"), 0.05)


@pytest.mark.usefixtures("small_tiles")
def test_one_number_per_row_is_saved():
    inputs = random_inputs((20, 8), (64, 8), (64, 8), **FLOAT)
    own = {tensor.data_ptr() for tensor in inputs}
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(0 if tensor.data_ptr() in own else tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        pattention(*inputs, backend="triton")
    assert sum(sizes) == 20
    with torch.inference_mode():
        assert not pattention(*inputs, backend="triton").requires_grad


@thetas
@pytest.mark.usefixtures("small_tiles")
def test_registered_operators_keep_their_promises(theta):
    x, keys, values = random_inputs((5, 4), (4, 9), (9, 3), **FLOAT)
    arguments = (x, keys.T, values, one_number(9.0).reshape(()), "triton", theta, "none", 1e-3)
    torch.library.opcheck(torch.ops.tokenformer.pattention.default, arguments)


@thetas
@pytest.mark.usefixtures("small_tiles")
def test_compiles_whole_with_gradients(theta):
    torch._dynamo.reset()
    inputs = random_inputs((10, 6), (30, 6), (30, 5), **FLOAT)
    scale = one_number(11.0)

    def layer(x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return 2 * pattention(
            x, keys, values, theta=theta, backend="triton", eps=1e-3, scale_tokens=scale
        )

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found, wanted = (
        torch.autograd.grad(function(*inputs).square().sum(), [*inputs, scale])
        for function in (compiled, layer)
    )
    assert_close(list(found), list(wanted), 1e-6)
