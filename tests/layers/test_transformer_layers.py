"""The encoder and decoder layers as replacements of torch's.

With torch's weights in linear projections our layers must give torch's numbers, whatever the mask
convention; that is how the conventions are tested. The rest is tested with parameter tokens.
"""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import tokenformer
from tokenformer.layers import (
    Attention,
    Pattention,
    TokenformerDecoderLayer,
    TokenformerEncoderLayer,
)

D, HEADS, BATCH, TARGET, SOURCE = 12, 3, 4, 5, 7
CAUSAL = torch.ones(TARGET, TARGET, dtype=torch.bool).triu(1)

pytestmark = pytest.mark.filterwarnings(
    "ignore:Support for mismatched .*mask:UserWarning",
    "ignore:enable_nested_tensor is True:UserWarning",
)


def linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
    made.load_state_dict({"weight": weight, "bias": bias})
    return made


def give_weights(ours: Attention, theirs: nn.MultiheadAttention) -> None:
    weights, biases = theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3)
    ours.q, ours.k, ours.v = (linear(*pair) for pair in zip(weights, biases, strict=True))
    ours.o = copy.deepcopy(theirs.out_proj)


def torch_layer_and_twin(kind: str, **options) -> tuple[nn.Module, nn.Module]:
    """A layer of torch's, and ours with its weights in the place of parameter tokens."""
    torch.manual_seed(0)
    options = {"dropout": 0.0, "dtype": torch.float64, **options}
    if kind == "encoder":
        theirs = nn.TransformerEncoderLayer(D, HEADS, 20, **options)
        ours = TokenformerEncoderLayer(D, HEADS, 20, norm_parameters="weight_bias", **options)
    else:
        theirs = nn.TransformerDecoderLayer(D, HEADS, 20, **options)
        ours = TokenformerDecoderLayer(D, HEADS, 20, norm_parameters="weight_bias", **options)
        give_weights(ours.multihead_attn, theirs.multihead_attn)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))  # no bias stays zero, no norm one
    give_weights(ours.self_attn, theirs.self_attn)
    if kind == "decoder":
        give_weights(ours.multihead_attn, theirs.multihead_attn)
    ours.ffn = nn.Sequential(theirs.linear1, nn.ReLU(), theirs.linear2)
    for name, norm in theirs.named_children():
        if name.startswith("norm"):
            getattr(ours, name).load_state_dict(norm.state_dict())
    return theirs, ours


def random_mask(*shape: int) -> Tensor:
    """True means "do not attend", as in torch's layers; something is always left to attend to."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[..., 0] = False
    return mask


def random_bias(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def as_float(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -math.inf)


def masks(length: int, seen: int, batch: int = BATCH) -> dict[str, tuple[Tensor | None, ...]]:
    """(mask, key padding mask) in every convention torch knows."""
    square, heads, padding = (length, seen), (batch * HEADS, length, seen), (batch, seen)
    return {
        "none": (None, None),
        "bool": (random_mask(*square), None),
        "float": (random_bias(*square), None),
        "float with -inf": (as_float(random_mask(*square)), None),
        "bool per head": (random_mask(*heads), None),
        "float per head": (random_bias(*heads), None),
        "bool padding": (None, random_mask(*padding)),
        "float padding": (None, random_bias(*padding)),
        "bool and bool padding": (random_mask(*square), random_mask(*padding)),
        "bool per head and bool padding": (random_mask(*heads), random_mask(*padding)),
        "float and float padding": (random_bias(*square), as_float(random_mask(*padding))),
        "float and bool padding": (random_bias(*square), random_mask(*padding)),
        "bool and float padding": (random_mask(*square), random_bias(*padding)),
    }


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def sequences(length: int, batch_first: bool) -> Tensor:
    return draw(*((BATCH, length) if batch_first else (length, BATCH)), D)


def test_public_names_are_the_layers():
    assert tokenformer.TokenformerEncoderLayer is TokenformerEncoderLayer
    assert tokenformer.TokenformerDecoderLayer is TokenformerDecoderLayer


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("convention", masks(1, 1))
def test_encoder_layer_agrees_with_torch(convention, batch_first, norm_first):
    theirs, ours = torch_layer_and_twin("encoder", batch_first=batch_first, norm_first=norm_first)
    src = sequences(TARGET, batch_first)
    mask, padding = masks(TARGET, TARGET)[convention]
    expected = theirs(src, src_mask=mask, src_key_padding_mask=padding)
    torch.testing.assert_close(ours(src, mask, padding), expected)
    if convention != "none":
        assert not torch.allclose(ours(src), expected, atol=1e-4)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("convention", masks(1, 1))
def test_decoder_layer_agrees_with_torch(convention, batch_first):
    theirs, ours = torch_layer_and_twin("decoder", batch_first=batch_first, norm_first=True)
    tgt, memory = sequences(TARGET, batch_first), sequences(SOURCE, batch_first)
    own, own_padding = masks(TARGET, TARGET)[convention]
    cross, cross_padding = masks(TARGET, SOURCE)[convention]
    for used in (
        {"tgt_mask": own, "tgt_key_padding_mask": own_padding},
        {"memory_mask": cross, "memory_key_padding_mask": cross_padding},
    ):
        expected = theirs(tgt, memory, **used)
        torch.testing.assert_close(ours(tgt, memory, **used), expected)
        if convention != "none":
            assert not torch.allclose(ours(tgt, memory), expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("convention", ["none", "bool", "float per head", "bool padding"])
def test_unbatched_input_agrees_with_torch(convention, kind):
    theirs, ours = torch_layer_and_twin(kind, batch_first=False, norm_first=False)
    inputs = [draw(TARGET, D)] if kind == "encoder" else [draw(TARGET, D), draw(SOURCE, D)]
    mask, padding = masks(TARGET, TARGET, batch=1)[convention]
    padding = None if padding is None else padding[0]
    name = "src" if kind == "encoder" else "tgt"
    used = {f"{name}_mask": mask, f"{name}_key_padding_mask": padding}
    out = ours(*inputs, **used)
    assert out.shape == (TARGET, D)
    torch.testing.assert_close(out, theirs(*inputs, **used))


@pytest.mark.parametrize("batch_first", [True, False])
def test_causal_hint(batch_first):
    theirs, ours = torch_layer_and_twin("encoder", batch_first=batch_first, norm_first=True)
    src = sequences(TARGET, batch_first)
    mask = nn.Transformer.generate_square_subsequent_mask(TARGET, dtype=torch.float64)
    expected = theirs(src, mask, is_causal=True)
    torch.testing.assert_close(ours(src, mask, is_causal=True), expected)
    # torch refuses the hint without the mask; here it is enough, and padding may be added to it.
    torch.testing.assert_close(ours(src, is_causal=True), expected)
    padding = random_mask(BATCH, TARGET)
    torch.testing.assert_close(
        ours(src, src_key_padding_mask=padding, is_causal=True),
        theirs(src, CAUSAL, padding),
    )


def test_causal_hints_of_the_decoder_layer():
    theirs, ours = torch_layer_and_twin("decoder", norm_first=True)
    tgt, memory = sequences(TARGET, False), sequences(SOURCE, False)
    expected = theirs(tgt, memory, tgt_mask=CAUSAL)
    torch.testing.assert_close(ours(tgt, memory, tgt_is_causal=True), expected)
    later = torch.ones(TARGET, SOURCE, dtype=torch.bool).triu(1)
    expected = theirs(tgt, memory, memory_mask=later)
    torch.testing.assert_close(ours(tgt, memory, memory_is_causal=True), expected)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("convention", masks(1, 1))
def test_encoder_stack_agrees_with_torch(convention, batch_first):
    theirs, ours = torch_layer_and_twin("encoder", batch_first=batch_first, norm_first=True)
    stacks = [
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False) for layer in (theirs, ours)
    ]
    src = sequences(TARGET, batch_first)
    mask, padding = masks(TARGET, TARGET)[convention]
    outs = [stack(src, mask, padding) for stack in stacks]
    torch.testing.assert_close(outs[1], outs[0])


@pytest.mark.parametrize("batch_first", [True, False])
def test_whole_transformer_agrees_with_torch(batch_first):
    options = {"batch_first": batch_first, "norm_first": False}
    encoders = torch_layer_and_twin("encoder", **options)
    decoders = torch_layer_and_twin("decoder", **options)
    src, tgt = sequences(SOURCE, batch_first), sequences(TARGET, batch_first)
    padding = random_mask(BATCH, SOURCE)
    outs = []
    for encoder, decoder in zip(encoders, decoders, strict=True):
        transformer = nn.Transformer(
            D,
            HEADS,
            custom_encoder=nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False),
            custom_decoder=nn.TransformerDecoder(decoder, 2),
            batch_first=batch_first,
            dtype=torch.float64,
        )
        with torch.no_grad():  # nn.Transformer reinitializes all matrices in another order
            for stack, layer in ((transformer.encoder, encoder), (transformer.decoder, decoder)):
                for clone in stack.layers:
                    clone.load_state_dict(layer.state_dict())
        outs.append(
            transformer(
                src,
                tgt,
                tgt_mask=nn.Transformer.generate_square_subsequent_mask(TARGET, dtype=src.dtype),
                src_key_padding_mask=padding,
                memory_key_padding_mask=padding,
                tgt_is_causal=True,
            )
        )
    torch.testing.assert_close(outs[1], outs[0])


def encoder_layer(**options) -> TokenformerEncoderLayer:
    torch.manual_seed(0)
    return TokenformerEncoderLayer(D, HEADS, 20, dtype=torch.float64, **options).eval()


def decoder_layer(**options) -> TokenformerDecoderLayer:
    torch.manual_seed(0)
    return TokenformerDecoderLayer(D, HEADS, 20, dtype=torch.float64, **options).eval()


@pytest.mark.parametrize("norm_first", [True, False])
def test_padding_has_no_influence(norm_first):
    layer = encoder_layer(batch_first=True, norm_first=norm_first)
    src = draw(BATCH, TARGET, D)
    padding = torch.arange(TARGET).expand(BATCH, -1) >= torch.tensor([5, 3, 1, 4])[:, None]
    out = layer(src, src_key_padding_mask=padding)
    changed = layer(
        torch.where(padding[..., None], 100 * draw(D), src), src_key_padding_mask=padding
    )
    torch.testing.assert_close(changed[~padding], out[~padding])
    # As if the padding had never been there; while a change in what is seen is seen by all.
    torch.testing.assert_close(out[1, :3], layer(src[1:2, :3])[0])
    src[:, 0] *= -1
    moved = (layer(src, src_key_padding_mask=padding) - out).abs().amax(-1) > 1e-6
    assert moved.all()


def test_memory_mask_hides_memory():
    layer = decoder_layer(batch_first=True)
    tgt, memory = draw(1, TARGET, D), draw(1, SOURCE, D).requires_grad_()
    mask = random_mask(TARGET, SOURCE)
    out = layer(tgt, memory, memory_mask=mask)
    for t in range(TARGET):
        (gradient,) = torch.autograd.grad(out[0, t].sum(), memory, retain_graph=True)
        # Self-attention comes first, so nothing of the memory reaches one target through another.
        assert ((gradient[0].abs().sum(-1) > 0) == ~mask[t]).all()


def test_per_head_masks_reach_their_own_batch_row():
    layer = encoder_layer(batch_first=True)
    src = draw(BATCH, TARGET, D)
    mask = random_mask(BATCH * HEADS, TARGET, TARGET)
    out = layer(src, mask)
    for row in range(BATCH):
        alone = layer(src[row], mask[row * HEADS : (row + 1) * HEADS])
        torch.testing.assert_close(out[row], alone)


def test_rows_with_nothing_to_attend_to_are_finite():
    layer = encoder_layer(batch_first=True)
    src = draw(2, TARGET, D).requires_grad_()
    padding = torch.tensor([[True] * TARGET, [False] * TARGET])
    out = layer(src, src_key_padding_mask=padding)
    out.sum().backward()
    assert out.isfinite().all()
    assert src.grad.isfinite().all()


@pytest.mark.parametrize("build", [encoder_layer, decoder_layer])
def test_layouts_agree(build):
    inputs = [draw(BATCH, TARGET, D), draw(BATCH, SOURCE, D)][: 1 + (build is decoder_layer)]
    expected = build(batch_first=True)(*inputs)
    swapped = build(batch_first=False)(*(x.transpose(0, 1) for x in inputs))
    torch.testing.assert_close(swapped.transpose(0, 1), expected)
    torch.testing.assert_close(build()(*(x[0] for x in inputs)), expected[0])


def test_pre_and_post_norm():
    src = draw(2, TARGET, D)
    pre, post = (encoder_layer(batch_first=True, norm_first=first) for first in (True, False))
    x = src + pre.self_attn(pre.norm1(src))[0]
    torch.testing.assert_close(pre(src), x + pre.ffn(pre.norm2(x)))
    x = post.norm1(src + post.self_attn(src)[0])
    torch.testing.assert_close(post(src), post.norm2(x + post.ffn(x)))


@pytest.mark.parametrize("build", [encoder_layer, decoder_layer])
@pytest.mark.parametrize("norm_first", [True, False])
def test_dropout_only_in_training(build, norm_first):
    inputs = [draw(TARGET, D), draw(SOURCE, D)][: 1 + (build is decoder_layer)]
    layer = build(dropout=0.4, norm_first=norm_first)
    without = build(dropout=0.0, norm_first=norm_first).train()
    assert torch.equal(layer(*inputs), without(*inputs))
    layer.train()
    assert not torch.allclose(layer(*inputs), layer(*inputs))


@pytest.mark.parametrize("build", [encoder_layer, decoder_layer])
@pytest.mark.parametrize("norm_first", [True, False])
def test_gradients_reach_every_parameter(build, norm_first):
    inputs = [draw(TARGET, D), draw(SOURCE, D)][: 1 + (build is decoder_layer)]
    layer = build(norm_first=norm_first, norm_parameters="weight_bias")
    (layer(*inputs) * draw(TARGET, D)).sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_token_counts():
    options = {"qkv_tokens": 9, "output_tokens": 11, "theta": "gelu_l2"}
    for layer in (encoder_layer(**options), decoder_layer(**options)):
        layers = {n: m for n, m in layer.named_modules() if isinstance(m, Pattention)}
        counts = {name.rpartition(".")[2]: module.num_tokens for name, module in layers.items()}
        assert counts == {"q": 9, "k": 9, "v": 9, "o": 11, "ffn": 20}
        assert all(module.theta == "gelu_l2" for module in layers.values())
    assert encoder_layer().self_attn.q.num_tokens == D


@pytest.mark.parametrize("batch_first", [True, False])
def test_whole_transformer_of_tokens(batch_first):
    transformer = nn.Transformer(
        D,
        HEADS,
        custom_encoder=nn.TransformerEncoder(encoder_layer(batch_first=batch_first), 2),
        custom_decoder=nn.TransformerDecoder(decoder_layer(batch_first=batch_first), 2),
        batch_first=batch_first,
        dtype=torch.float64,
    ).eval()
    src = sequences(SOURCE, batch_first).requires_grad_()
    tgt = sequences(TARGET, batch_first).requires_grad_()
    padding = torch.zeros(BATCH, SOURCE, dtype=torch.bool)
    padding[:, -2:] = True
    out = transformer(
        src,
        tgt,
        tgt_mask=CAUSAL,
        src_key_padding_mask=padding,
        memory_key_padding_mask=padding,
    )
    assert out.shape == tgt.shape
    axis = 1 if batch_first else 0
    out.select(axis, 2).square().sum().backward()
    reached = src.grad.abs().sum(dim=(1 - axis, 2)) > 0, tgt.grad.abs().sum(dim=(1 - axis, 2)) > 0
    assert reached[0].tolist() == [True] * (SOURCE - 2) + [False] * 2
    assert reached[1].tolist() == [True] * 3 + [False] * 2
    assert all(parameter.grad is not None for parameter in transformer.parameters())


def test_stacked_layers_are_independent():
    stack = nn.TransformerEncoder(encoder_layer(), 2)
    first, second = stack.layers
    with torch.no_grad():
        first.ffn.value_tokens.zero_()
    assert second.ffn.value_tokens.any()


@pytest.mark.parametrize(
    ("mask", "padding", "error", "named"),
    [
        # [S, B] in the place of [B, S] has the right number of elements.
        (None, torch.zeros(TARGET, BATCH, dtype=torch.bool), ValueError, r"\(5, 4\).*\(4, 5\)"),
        (None, torch.zeros(BATCH, TARGET, dtype=torch.long), TypeError, r"torch\.int64"),
        (torch.zeros(TARGET, TARGET, dtype=torch.uint8), None, TypeError, r"torch\.uint8"),
        (torch.zeros(TARGET, 1), None, ValueError, r"\(5, 1\).*\(5, 5\)"),
        (torch.zeros(BATCH, TARGET, TARGET), None, ValueError, r"\(4, 5, 5\).*\(12, 5, 5\)"),
    ],
)
def test_wrong_masks_are_named(mask, padding, error, named):
    layer = encoder_layer(batch_first=True)
    src = draw(BATCH, TARGET, D)
    with pytest.raises(error, match=named):
        layer(src, mask, padding)
    with pytest.raises((AssertionError, RuntimeError)):  # which torch's own refuses too
        nn.TransformerEncoderLayer(D, HEADS, 20, batch_first=True)(src.float(), mask, padding)


def test_transposed_cross_mask_is_refused():
    layer = decoder_layer(batch_first=True)
    mask = torch.zeros(BATCH * HEADS, SOURCE, TARGET, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"\(12, 7, 5\).*\(12, 5, 7\)"):
        layer(draw(BATCH, TARGET, D), draw(BATCH, SOURCE, D), memory_mask=mask)


def test_heads_that_do_not_divide_the_model_are_named():
    with pytest.raises(ValueError, match=r"d_model=12.*nhead=5"):
        TokenformerEncoderLayer(12, 5)


@pytest.mark.parametrize("convention", masks(1, 1))
def test_autocast_and_half_precision(convention):
    layer = encoder_layer(batch_first=True).float()
    src = draw(BATCH, TARGET, D).float()
    mask, padding = masks(TARGET, TARGET)[convention]
    expected = layer(src, mask, padding)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autocast = layer(src, mask, padding)
    # The residual stream keeps its dtype, and masks of another dtype are brought to it.
    assert autocast.dtype == torch.float32
    half = layer.bfloat16()(src.bfloat16(), mask, padding)
    assert half.dtype == torch.bfloat16
    for out in (autocast, half.float()):
        assert (out - expected).norm() < 0.05 * expected.norm()


def test_compiles_without_a_graph_break():
    torch._dynamo.reset()
    layer = decoder_layer(batch_first=True)
    tgt, memory = draw(BATCH, TARGET, D), draw(BATCH, SOURCE, D)
    used = {
        "tgt_mask": random_mask(BATCH * HEADS, TARGET, TARGET),
        "memory_key_padding_mask": random_mask(BATCH, SOURCE),
    }
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(tgt, memory, **used), layer(tgt, memory, **used))


def test_meta_device_then_reset():
    layer = TokenformerDecoderLayer(D, HEADS, 20, norm_parameters="weight_bias", device="meta")
    layer.to_empty(device="cpu")
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            for parameter in module.parameters():
                nn.init.constant_(parameter, math.nan)
            module.reset_parameters()
    assert layer(torch.randn(TARGET, D), torch.randn(SOURCE, D)).isfinite().all()
