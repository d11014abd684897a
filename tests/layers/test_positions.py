"""Rotary positions against rotation in the complex plane; learned and absent positions."""

import pytest
import torch
from torch import Tensor

from tokenformer.layers import LearnedPositions, NoPositions, RotaryPositions
from tokenformer.layers.positions import rotate


def rotated_in_the_complex_plane(
    heads: Tensor, position_ids: Tensor, dim: int, base: float
) -> Tensor:
    """Channels j and j + dim/2 are one complex number, turned by position * base^(-2j/dim)."""
    half = dim // 2
    numbers = torch.complex(heads[..., :half], heads[..., half:dim])  # [B, H, T, dim / 2]
    out = heads.clone()
    for j in range(half):
        angle = position_ids.double() * base ** (-2 * j / dim)  # [B, T]
        turned = numbers[..., j] * torch.polar(torch.ones_like(angle), angle)[:, None]
        out[..., j], out[..., j + half] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("base", [10000.0, 500.0])
@pytest.mark.parametrize("dim", [2, 4, 16])
def test_rotary_turns_pairs_of_channels(dim, base):
    torch.manual_seed(0)
    heads = torch.randn(2, 3, 5, 16, dtype=torch.float64)
    # Rows at different places, as left padding or packing makes them.
    position_ids = torch.tensor([[0, 1, 2, 3, 4], [7, 8, 300, 301, 2047]])
    hidden = torch.randn(2, 5, 48, dtype=torch.float64)
    unchanged, rotation = RotaryPositions(dim, base)(hidden, position_ids)
    assert unchanged is hidden
    expected = rotated_in_the_complex_plane(heads, position_ids, dim, base)
    # The angles are fp32, as in every released model: 2047 radians are good to 1e-4.
    torch.testing.assert_close(rotate(heads, rotation), expected, rtol=0, atol=1e-3)
    torch.testing.assert_close(rotate(heads, rotation)[0], expected[0], rtol=0, atol=1e-5)


def test_partial_rotary_leaves_the_rest_alone():
    heads = torch.randn(1, 2, 6, 16)
    _, rotation = RotaryPositions(4)(heads, torch.arange(6)[None])
    turned = rotate(heads, rotation)
    assert torch.equal(turned[..., 4:], heads[..., 4:])
    assert torch.equal(turned[:, :, 0], heads[:, :, 0])  # position 0
    moved = (turned != heads)[..., :4]
    assert moved[:, :, 1:].all()


def test_scores_depend_on_the_distance_only():
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)

    def score(query_position: int, key_position: int) -> float:
        positions = RotaryPositions(8)
        turned = [
            rotate(heads, positions(heads, torch.tensor([[position]]))[1])
            for heads, position in ((query, query_position), (key, key_position))
        ]
        return (turned[0] * turned[1]).sum().item()

    for shift in (1, 17, 500):
        assert score(9 + shift, 4 + shift) == pytest.approx(score(9, 4), abs=1e-3)
    assert score(9, 5) != pytest.approx(score(9, 4), abs=1e-2)
    assert score(4, 9) != pytest.approx(score(9, 4), abs=1e-2)


def test_frequencies_survive_bfloat16_and_the_meta_device():
    position_ids = torch.tensor([[2047]])
    rotary = RotaryPositions(16)
    assert not list(rotary.buffers())
    _, expected = rotary(torch.zeros(1, 1, 8), position_ids)
    with torch.device("meta"):
        half = RotaryPositions(16)
    half.to_empty(device="cpu").bfloat16()
    _, rotation = half(torch.zeros(1, 1, 8, dtype=torch.bfloat16), position_ids)
    for ours, wide in zip(rotation, expected, strict=True):
        assert ours.dtype == torch.bfloat16
        assert torch.equal(ours, wide.bfloat16())


def test_angles_survive_autocast():
    position_ids = torch.arange(2048)[None]
    rotary = RotaryPositions(16)
    _, expected = rotary(torch.zeros(1, 2048, 8), position_ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, rotation = rotary(torch.zeros(1, 2048, 8), position_ids)
    torch.testing.assert_close(rotation, expected)


@pytest.mark.parametrize("dim", [0, 3, -2])
def test_wrong_dims_are_named(dim):
    with pytest.raises(ValueError, match=f"dim={dim}"):
        RotaryPositions(dim)


def test_learned_positions_are_added():
    positions = LearnedPositions(10, 8)
    hidden = torch.randn(2, 3, 8)
    position_ids = torch.tensor([[0, 1, 2], [4, 9, 4]])
    out, rotation = positions(hidden, position_ids)
    assert rotation is None
    torch.testing.assert_close(out - hidden, positions.weight[position_ids])
    out.sum().backward()
    assert positions.weight.grad[4].eq(2).all()
    assert positions.weight.grad[3].eq(0).all()


def test_no_positions_do_nothing():
    hidden = torch.randn(2, 3, 8)
    out, rotation = NoPositions()(hidden, torch.arange(3)[None])
    assert out is hidden
    assert rotation is None


def test_a_sequence_longer_than_the_learned_positions_is_refused_by_name():
    positions = LearnedPositions(8, 4)
    ids = torch.arange(9)[None]
    assert positions(torch.zeros(1, 8, 4), ids[:, :8])[0].shape == (1, 8, 4)
    with pytest.raises(ValueError, match="sequence of 9 is longer than the 8 learned positions"):
        positions(torch.zeros(1, 9, 4), ids)
