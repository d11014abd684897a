"""Token-token attention against the plain formula, head by head, and with a cache."""

import math

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from tokenformer.layers import Attention, Pattention, RotaryPositions
from tokenformer.layers.positions import Rotation, rotate

D, HEADS, HEAD_DIM = 24, 4, 8  # the heads are wider together than the model


def build(kv_heads: int = HEADS, linear: bool = False, **options) -> Attention:
    torch.manual_seed(0)

    def projection(d_in: int, d_out: int) -> nn.Module:
        made = nn.Linear(d_in, d_out, bias=False) if linear else Pattention(d_in, d_out, 20)
        return made.double()

    inner = HEADS * HEAD_DIM
    return Attention(
        projection(D, inner),
        projection(D, kv_heads * HEAD_DIM),
        projection(D, kv_heads * HEAD_DIM),
        projection(inner, D),
        head_dim=HEAD_DIM,
        num_heads=HEADS,
        num_key_value_heads=kv_heads,
        **options,
    ).eval()


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def plain(
    attention: Attention,
    x: Tensor,
    context: Tensor | None = None,
    added: Tensor | None = None,  # [B, H, T, S]
    rotation: Rotation | None = None,
) -> Tensor:
    """softmax(Q K^T / sqrt(head_dim)) V of every batch row and head, written out."""
    context = x if context is None else context
    q, k, v = attention.q(x), attention.k(context), attention.v(context)
    groups = q.shape[-1] // k.shape[-1]
    out = torch.empty_like(q)

    def turned(head: Tensor, row: int) -> Tensor:
        if rotation is None:
            return head
        return rotate(head[None, None], tuple(part[row : row + 1] for part in rotation))[0, 0]

    for row in range(len(x)):
        for head in range(HEADS):
            own = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            shared = slice(head // groups * HEAD_DIM, (head // groups + 1) * HEAD_DIM)
            scores = turned(q[row, :, own], row) @ turned(k[row, :, shared], row).T
            scores = scores / math.sqrt(HEAD_DIM)
            if added is not None:
                scores = scores + added[row, head]
            out[row, :, own] = torch.softmax(scores, dim=-1) @ v[row, :, shared]
    return attention.o(out)


def causal(length: int) -> Tensor:
    return torch.full((length, length), -math.inf, dtype=torch.float64).triu(1)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("is_causal", [False, True])
def test_follows_the_formula(is_causal, kv_heads, linear):
    attention = build(kv_heads, linear, is_causal=is_causal)
    x = draw(2, 7, D)
    added = causal(7).expand(2, HEADS, 7, 7) if is_causal else None
    out, weights = attention(x)
    assert weights is None
    torch.testing.assert_close(out, plain(attention, x, added=added))


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_masks(kv_heads):
    attention = build(kv_heads)
    x = draw(2, 5, D)
    attend = torch.rand(2, HEADS, 5, 5) < 0.6
    attend[..., 0] = True
    added = torch.zeros(2, HEADS, 5, 5, dtype=torch.float64).masked_fill(~attend, -math.inf)
    expected = plain(attention, x, added=added)
    torch.testing.assert_close(attention(x, attention_mask=attend)[0], expected)
    torch.testing.assert_close(attention(x, attention_mask=added)[0], expected)
    bias = draw(2, HEADS, 5, 5)
    biased = attention(x, attention_mask=bias)[0]
    torch.testing.assert_close(biased, plain(attention, x, added=bias))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_combines_with_the_causal_one(dtype):
    attention = build(is_causal=True)
    x = draw(2, 5, D)
    padding = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    padding[1, ..., 0] = False
    added = torch.zeros(2, 1, 1, 5).masked_fill(~padding, -torch.inf)
    mask = padding if dtype == torch.bool else added
    out = attention(x, attention_mask=mask)[0]
    both = (causal(5) + added).expand(2, HEADS, 5, 5)
    # The first token of the padded row may attend to nothing at all.
    torch.testing.assert_close(out[:, 1:], plain(attention, x, added=both)[:, 1:])
    torch.testing.assert_close(out[0], attention(x[:1])[0][0])


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_rotation(kv_heads):
    attention = build(kv_heads, is_causal=True)
    x = draw(2, 6, D)
    _, rotation = RotaryPositions(2)(x, torch.tensor([[0, 1, 2, 3, 4, 5], [9, 10, 11, 12, 13, 14]]))
    expected = plain(attention, x, added=causal(6).expand(2, HEADS, 6, 6), rotation=rotation)
    out = attention(x, rotation=rotation)[0]
    torch.testing.assert_close(out, expected)
    assert not torch.allclose(out, attention(x)[0], atol=1e-4)


def test_outputs_depend_on_relative_positions_only():
    attention = build(is_causal=True)
    x = draw(1, 6, D)
    rotary = RotaryPositions(4)
    outs = [
        attention(x, rotation=rotary(x, positions[None])[1])[0]
        for positions in (torch.arange(6), torch.arange(100, 106), 2 * torch.arange(6))
    ]
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=1e-4)
    assert not torch.allclose(outs[0], outs[2], rtol=0, atol=1e-3)


def test_cross_attention():
    attention = build()
    x, context = draw(2, 3, D), draw(2, 8, D)
    out = attention(x, context=context)[0]
    torch.testing.assert_close(out, plain(attention, x, context))
    attend = torch.arange(8) < 5
    masked = attention(x, context=context, attention_mask=attend.expand(2, 1, 3, 8))[0]
    torch.testing.assert_close(masked, plain(attention, x, context[:, :5]))


def test_future_has_no_influence():
    attention = build(is_causal=True)
    x = draw(1, 6, D).requires_grad_()
    out = attention(x)[0]
    for t in range(6):
        (gradient,) = torch.autograd.grad(out[0, t].sum(), x, retain_graph=True)
        reached = gradient[0].abs().sum(-1) > 0
        assert reached.tolist() == [s <= t for s in range(6)]


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("chunks", [(1,) * 13, (5, 1, 4, 3), (3, 7, 1, 2), (1, 12), (13,)])
def test_cached_chunks_equal_the_whole(chunks, kv_heads):
    attention = build(kv_heads, is_causal=True, layer_idx=0)
    x = draw(2, 13, D)
    rotary = RotaryPositions(4)
    positions = torch.stack((torch.arange(13), torch.arange(13) + 5))
    whole = attention(x, rotation=rotary(x, positions)[1])[0]
    cache = DynamicCache()
    start = 0
    for size in chunks:
        part = slice(start, start + size)
        rotation = rotary(x, positions[:, part])[1]
        out = attention(x[:, part], rotation=rotation, past_key_values=cache)[0]
        torch.testing.assert_close(out, whole[:, part])
        start += size
    assert cache.get_seq_length() == 13
    assert cache.layers[0].keys.shape == (2, kv_heads, 13, HEAD_DIM)  # groups are not expanded


def test_layers_keep_their_own_cache():
    attentions = [build(is_causal=True, layer_idx=index) for index in range(2)]
    x, other = draw(1, 4, D), draw(1, 4, D)
    cache = DynamicCache()
    for part in (slice(0, 3), slice(3, 4)):
        first = attentions[0](x[:, part], past_key_values=cache)[0]
        second = attentions[1](other[:, part], past_key_values=cache)[0]
    torch.testing.assert_close(first, attentions[0](x)[0][:, 3:])
    torch.testing.assert_close(second, attentions[1](other)[0][:, 3:])


def test_grouped_heads_are_full_heads_repeated():
    grouped, full = build(2), build(4)
    full.load_state_dict(
        {
            name: tokens.unflatten(1, (2, HEAD_DIM)).repeat_interleave(2, dim=1).flatten(1)
            if name in ("k.value_tokens", "v.value_tokens")
            else tokens
            for name, tokens in grouped.state_dict().items()
        }
    )
    x = draw(2, 5, D)
    torch.testing.assert_close(grouped(x)[0], full(x)[0])


def test_dropout_only_in_training():
    attention = build(dropout=0.5)
    x = draw(2, 5, D)
    torch.testing.assert_close(attention(x)[0], plain(attention, x))
    attention.train()
    assert not torch.allclose(attention(x)[0], attention(x)[0])


def test_gradients_reach_every_parameter():
    attention = build(2, is_causal=True)
    attention(draw(2, 5, D))[0].square().sum().backward()
    for name, parameter in attention.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_heads_that_cannot_be_grouped_are_named():
    with pytest.raises(ValueError, match=r"num_heads=4.*num_key_value_heads=3"):
        build(3)


@pytest.mark.parametrize("is_causal", [False, True])
def test_compiles_without_a_graph_break(is_causal):
    torch._dynamo.reset()
    attention = build(2, is_causal=is_causal)
    x = draw(2, 5, D)
    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x)[0], attention(x)[0])
