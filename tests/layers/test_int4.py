"""4-bit tokens: rounding and packing."""

import pytest
import torch

from tokenformer.layers import Pattention
from tokenformer.layers.int4 import Int4Pattention, pack, quantize_groups, unpack


def test_packing_is_reversible():
    numbers = torch.randint(-8, 8, (3, 5, 8, 32), dtype=torch.int8)
    packed = pack(numbers)
    assert (packed.dtype, packed.shape) == (torch.uint8, (3, 5, 128))
    assert torch.equal(unpack(packed), numbers)


def test_groups_of_any_size():
    """Errors of a normal distribution: 4 bits with a scale per 32 numbers."""
    groups = torch.randn(4000, 32) * torch.logspace(-20, 20, 4000)[:, None]
    groups[7] = 0
    numbers, scales = quantize_groups(groups)
    assert numbers.min() == -8
    assert numbers.max() == 7
    found = numbers.double() * scales.double()[:, None]
    assert not found[7].any()
    error = (found - groups).norm(dim=1) / groups.double().norm(dim=1)
    assert error.nan_to_num().max() < 0.2
    assert error.nan_to_num().mean() < 0.085


def test_16_equal_steps_are_exact():
    numbers = torch.arange(-8, 8.0).repeat(2)[None]
    found, scales = quantize_groups(0.25 * numbers)
    assert torch.equal(found * scales.float()[:, None], 0.25 * numbers)


@pytest.mark.parametrize("shape", [(300, 70, 50), (256, 64, 32), (1, 1, 1)])
def test_a_layer_is_near_its_tokens(shape):
    d_in, d_out, n = shape
    torch.manual_seed(0)
    layer = Pattention(d_in, d_out, n)
    layer.key_tokens.data.normal_()
    layer.value_tokens.data.normal_()
    keys, values = Int4Pattention(layer).dequantized(torch.float32)
    for found, exact in ((keys, layer.key_tokens), (values, layer.value_tokens)):
        assert found.shape == exact.shape
        assert (found - exact).norm() < 0.1 * exact.norm()
