"""Pattention with tokens routed by modality, against two dense layers."""

import pytest
import torch
from torch import Tensor

from tokenformer.layers import ModalityPattention, ModalityRows, Pattention
from tokenformer.layers.pattention import project_all


def make_layer(new: int = 3, dtype: torch.dtype = torch.float64) -> ModalityPattention:
    torch.manual_seed(0)
    return ModalityPattention(
        8,
        6,
        vision_tokens=5,
        new_tokens=new,
        language_tokens=7,
        vision_scale_tokens=9.0,
        scale_tokens=4.0,
        dtype=dtype,
    )


def dense(layer: ModalityPattention, rows: slice, scale: float) -> Pattention:
    keys, values = layer.key_tokens[rows], layer.value_tokens[rows]
    made = Pattention(8, 6, len(keys), scale_tokens=scale, backend="reference").to(keys.dtype)
    made.key_tokens.data, made.value_tokens.data = keys.detach(), values.detach()
    return made


def masks() -> dict[str, Tensor]:
    torch.manual_seed(1)
    shape = 3, 4
    return {
        "mixed": torch.rand(shape) < 0.5,
        "all images": torch.ones(shape, dtype=torch.bool),
        "all text": torch.zeros(shape, dtype=torch.bool),
    }


@pytest.mark.parametrize("kind", masks())
@pytest.mark.parametrize("new", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_each_modality_has_a_dense_layer_of_its_tokens(
    kind: str, new: int, dtype: torch.dtype
) -> None:
    layer, is_image = make_layer(new, dtype), masks()[kind]
    x = torch.randn(3, 4, 8, dtype=dtype, requires_grad=True)
    of_images = dense(layer, slice(0, 5 + new), 9.0)
    of_text = dense(layer, slice(5, None), 4.0)
    twin = x.detach().clone().requires_grad_()
    wanted = torch.where(is_image[..., None], of_images(twin), of_text(twin))
    found = layer(x, ModalityRows.of(is_image))
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
    probe = torch.randn_like(found)
    (found * probe).sum().backward()
    (wanted * probe).sum().backward()
    torch.testing.assert_close(x.grad, twin.grad, atol=4 * tolerance, rtol=4 * tolerance)
    for name in ("key_tokens", "value_tokens"):
        gradient = torch.zeros_like(getattr(layer, name))
        gradient[: 5 + new] += getattr(of_images, name).grad
        gradient[5:] += getattr(of_text, name).grad
        torch.testing.assert_close(
            getattr(layer, name).grad, gradient, atol=10 * tolerance, rtol=4 * tolerance
        )


def test_without_rows_it_is_the_layer_of_text():
    layer, x = make_layer(), torch.randn(3, 4, 8, dtype=torch.float64)
    torch.testing.assert_close(layer(x), dense(layer, slice(5, None), 4.0)(x))


def test_projecting_together_equals_projecting_apart():
    layers = [make_layer(dtype=torch.float32) for _ in range(3)]
    x = torch.randn(2, 4, 8)
    for routing in ((), (ModalityRows.of(torch.rand(2, 4) < 0.5),)):
        for found, layer in zip(project_all(layers, x, *routing), layers, strict=True):
            torch.testing.assert_close(found, layer(x, *routing))


def test_no_row_is_multiplied_with_tokens_of_the_other_modality():
    from torch.utils.flop_counter import FlopCounterMode

    layer = make_layer(dtype=torch.float32)
    layer.backend = "reference"
    x, rows = torch.randn(1, 10, 8), ModalityRows.of(torch.arange(10)[None] < 4)
    with FlopCounterMode(display=False) as counter:
        layer(x, rows)
    assert counter.get_total_flops() == 2 * (8 + 6) * (4 * 8 + 6 * 10)


def test_a_prefix_is_refused():
    layer = make_layer()
    with pytest.raises(ValueError, match="no prefix"):
        layer.active_tokens = 3
    assert layer.active_tokens is None


@pytest.mark.parametrize("name", ["vision_tokens", "language_tokens", "new_tokens"])
def test_counts_are_checked(name: str) -> None:
    counts = {"vision_tokens": 1, "new_tokens": 0, "language_tokens": 1} | {name: -1}
    with pytest.raises(ValueError, match=f"{name}=-1"):
        ModalityPattention(8, 6, **counts)
