"""The residual blocks: their two equations, and that options and caches pass through them."""

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from tokenformer.layers import (
    Attention,
    GeluMLP,
    LayerNorm,
    ParallelBlock,
    Pattention,
    RotaryPositions,
    SequentialBlock,
)

D = 16


def build(kind: type[SequentialBlock], layer_idx: int = 0, ffn: nn.Module | None = None):
    torch.manual_seed(layer_idx)
    attention = Attention(
        *(Pattention(D, D, 12) for _ in range(4)),
        head_dim=4,
        num_heads=4,
        is_causal=True,
        layer_idx=layer_idx,
    )
    norms = [LayerNorm(D, parameters="weight") for _ in range(2)]
    block = kind(attention, ffn or Pattention(D, D, 40), *norms).double()
    with torch.no_grad():
        for norm in norms:
            norm.weight.normal_()  # so that one norm is not taken for the other
    return block


def test_sequential_block():
    block = build(SequentialBlock)
    x = torch.randn(2, 5, D, dtype=torch.float64)
    attended = x + block.attention(block.attention_norm(x))[0]
    torch.testing.assert_close(block(x), attended + block.ffn(block.ffn_norm(attended)))


def test_parallel_block():
    block = build(ParallelBlock)
    x = torch.randn(2, 5, D, dtype=torch.float64)
    branches = block.attention(block.attention_norm(x))[0], block.ffn(block.ffn_norm(x))
    torch.testing.assert_close(block(x), x + branches[0] + branches[1])


def test_the_two_differ_in_their_wiring_only():
    sequential, parallel = build(SequentialBlock), build(ParallelBlock)
    assert list(sequential.state_dict()) == list(parallel.state_dict())
    parallel.load_state_dict(sequential.state_dict())
    x = torch.randn(2, 5, D, dtype=torch.float64)
    assert not torch.allclose(sequential(x), parallel(x), atol=1e-3)
    # With nothing from the attention the wiring cannot matter.
    for block in (sequential, parallel):
        nn.init.zeros_(block.attention.o.value_tokens)
    torch.testing.assert_close(sequential(x), parallel(x))


@pytest.mark.parametrize("kind", [SequentialBlock, ParallelBlock])
def test_options_reach_the_attention(kind):
    block = build(kind)
    x = torch.randn(1, 5, D, dtype=torch.float64)
    alone = torch.eye(5, dtype=torch.bool)
    masked = block(x, attention_mask=alone)
    one_by_one = torch.cat([block(x[:, t : t + 1]) for t in range(5)], dim=1)
    torch.testing.assert_close(masked, one_by_one)


@pytest.mark.parametrize("kind", [SequentialBlock, ParallelBlock])
def test_cached_chunks_of_a_stack_equal_the_whole(kind):
    blocks = [build(kind, layer_idx=index) for index in range(3)]
    x = torch.randn(2, 11, D, dtype=torch.float64)
    rotary = RotaryPositions(2)

    def run(part: slice, cache: DynamicCache | None) -> torch.Tensor:
        hidden = x[:, part]
        _, rotation = rotary(hidden, torch.arange(11)[None, part])
        for block in blocks:
            hidden = block(hidden, rotation=rotation, past_key_values=cache)
        return hidden

    cache = DynamicCache()
    parts = [slice(0, 3), slice(3, 4), slice(4, 9), slice(9, 11)]
    chunks = torch.cat([run(part, cache) for part in parts], dim=1)
    torch.testing.assert_close(chunks, run(slice(0, 11), None))


@pytest.mark.parametrize("kind", [SequentialBlock, ParallelBlock])
def test_gradients_reach_every_parameter(kind):
    block = build(kind, ffn=GeluMLP(D, 32))
    block(torch.randn(2, 5, D, dtype=torch.float64)).square().sum().backward()
    for name, parameter in block.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
