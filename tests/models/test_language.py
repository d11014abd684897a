"""The language models against their formula in plain PyTorch, and the interface of a Hugging Face
model."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Make = Callable[..., Any]
Weights = dict[str, Tensor]


def reference_logits(weights: Weights, config: Any, ids: Tensor) -> Tensor:
    """The whole model from its state dict, one sequence [T] at a time, head by head."""
    x = weights["model.embed_tokens.weight"][ids]  # [T, d]
    if config.positions == "learned":
        x = x + weights["model.positions.weight"][: len(ids)]
    for layer in range(config.num_hidden_layers):
        part = {
            name.removeprefix(f"model.layers.{layer}."): value
            for name, value in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        normed = reference_norm(x, part, "attention_norm", config)
        attended = reference_attention(normed, part, config, layer)
        if config.residual == "sequential":
            x = x + attended
            x = x + reference_map(
                reference_norm(x, part, "ffn_norm", config), part, "ffn", config, layer
            )
        else:
            ffn = reference_map(
                reference_norm(x, part, "ffn_norm", config), part, "ffn", config, layer
            )
            x = x + attended + ffn
    x = reference_norm(x, weights, "model.norm", config)
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return x @ weights[head].T


def reference_norm(x: Tensor, weights: Weights, name: str, config: Any) -> Tensor:
    if config.norm == "layer_norm":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt()
    return x * weights.get(f"{name}.weight", 1.0) + weights.get(f"{name}.bias", 0.0)


def reference_gelu(x: Tensor, config: Any) -> Tensor:
    if config.hidden_act == "gelu":
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def reference_map(x: Tensor, weights: Weights, name: str, config: Any, layer: int) -> Tensor:
    """One of the five learned maps of a layer, of either family."""
    if f"{name}.key_tokens" in weights:
        keys, values = weights[f"{name}.key_tokens"], weights[f"{name}.value_tokens"]
        scores = x @ keys.T
        scales = (config.scale_tokens or {}).get(name.split(".")[-1])
        scale = scales[layer] if scales and scales[layer] is not None else len(keys)
        length = scores.pow(2).sum(-1, keepdim=True).sqrt() + config.theta_eps
        return reference_gelu(scores / length * math.sqrt(scale), config) @ values
    if f"{name}.gate.weight" in weights:
        gate = x @ weights[f"{name}.gate.weight"].T
        units = gate * torch.sigmoid(gate) * (x @ weights[f"{name}.up.weight"].T)
        return units @ weights[f"{name}.down.weight"].T
    if f"{name}.up.weight" in weights:
        units = reference_gelu(x @ weights[f"{name}.up.weight"].T, config)
        return units @ weights[f"{name}.down.weight"].T
    return x @ weights[f"{name}.weight"].T


def reference_attention(x: Tensor, weights: Weights, config: Any, layer: int) -> Tensor:
    q, k, v = (reference_map(x, weights, f"attention.{name}", config, layer) for name in "qkv")
    head_dim = config.hidden_size // config.num_attention_heads
    group = config.num_attention_heads // config.num_key_value_heads
    heads = []
    for head in range(config.num_attention_heads):
        own = slice(head * head_dim, (head + 1) * head_dim)
        shared = slice(head // group * head_dim, (head // group + 1) * head_dim)
        query, key, value = q[:, own], k[:, shared], v[:, shared]  # [T, head_dim]
        if config.positions == "rotary":
            query, key = (reference_rotary(heads_, config) for heads_ in (query, key))
        scores = query @ key.T / math.sqrt(head_dim)
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ value)
    return reference_map(torch.cat(heads, -1), weights, "attention.o", config, layer)


def reference_rotary(head: Tensor, config: Any) -> Tensor:
    """Channels i and i + r/2 of the first r are one complex number, turned by its position."""
    r = int(head.shape[-1] * config.rotary_fraction)
    # The angles are float32 for any dtype of the model, as in the released code.
    steps = torch.arange(0, r, 2, dtype=torch.float32)
    frequencies = config.rotary_base ** (-steps / r)
    angles = torch.outer(torch.arange(len(head), dtype=torch.float32), frequencies)  # [T, r / 2]
    turn = torch.complex(angles.cos().to(head.dtype), angles.sin().to(head.dtype))
    turned = torch.complex(head[:, : r // 2], head[:, r // 2 : r]) * turn
    return torch.cat((turned.real, turned.imag, head[:, r:]), dim=-1)


BOTH = [
    {},
    {"positions": "learned"},
    {"positions": "none"},
    {"rotary_fraction": 1.0, "rotary_base": 500.0},
    {"norm_parameters": "bias", "final_norm_parameters": "none"},
    {"norm_parameters": "weight_bias", "norm_eps": 0.1},
    {"norm": "rms_norm", "norm_parameters": "weight", "final_norm_parameters": "weight"},
    {"norm": "rms_norm", "norm_parameters": "bias"},
    {"residual": "parallel"},
    {"hidden_act": "gelu_tanh"},
    {"tie_word_embeddings": False},
    {"num_key_value_heads": 2},
    {"num_key_value_heads": 1, "positions": "learned", "residual": "parallel"},
    {"variant": "paper"},
]
TOKENFORMER = [
    {"q_tokens": 5, "k_tokens": 7, "v_tokens": 9, "output_tokens": 11, "ffn_tokens": 13},
    {"qkv_tokens": [5, 6], "output_tokens": [7, 8], "ffn_tokens": [9, 1], "v_tokens": [2, 3]},
    {"theta_eps": 3.0},
    {"scale_tokens": {"q": [3.0, None], "k": [None, 5], "v": [99.5, 0.25], "o": [1.0, 7.0]}},
    {"scale_tokens": {"ffn": [None, 400.0]}},
]
TRANSFORMER = [{"mlp": "swiglu"}, {"mlp": "swiglu", "intermediate_size": None}]
CASES = [
    *[(family, options) for family in ("tokenformer", "transformer") for options in BOTH],
    *[("tokenformer", options) for options in TOKENFORMER],
    *[("transformer", options) for options in TRANSFORMER],
]


@pytest.mark.parametrize(("family", "options"), CASES, ids=str)
def test_whole_forward_is_the_formula(
    make_model: Make, family: str, options: dict[str, Any]
) -> None:
    model = make_model(family, **options)
    ids = torch.randint(61, (2, 11))
    logits = model(ids).logits
    expected = torch.stack([reference_logits(model.state_dict(), model.config, row) for row in ids])
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    if options:
        # The option must matter: the same weights without it give other logits. Those that change
        # the parameters cannot be taken away, and are proved by the formula alone.
        plain = make_model(family)
        if {n: p.shape for n, p in plain.named_parameters()} == {
            n: p.shape for n, p in model.named_parameters()
        }:
            plain.load_state_dict(model.state_dict())
            assert (plain(ids).logits - logits).abs().max() > 1e-3


def test_later_tokens_never_change_earlier_logits(make_model: Make, family: str) -> None:
    for options in ({}, {"positions": "learned", "residual": "parallel"}, {"positions": "none"}):
        model = make_model(family, **options)
        for kernel in ("sdpa", "eager"):
            model.set_attn_implementation(kernel)
            ids = torch.randint(61, (2, 13))
            before = model(ids).logits
            for changed in (0, 6, 12):
                other = ids.clone()
                other[:, changed] = (other[:, changed] + 1) % 61
                after = model(other).logits
                torch.testing.assert_close(after[:, :changed], before[:, :changed], rtol=0, atol=0)
                assert (after[:, changed:] - before[:, changed:]).abs().amin(-1).max() > 0
                assert ((after - before)[:, changed:].abs().amax(-1) > 1e-9).all()


def test_positions_are_relative_absolute_or_absent(make_model: Make, family: str) -> None:
    ids = torch.randint(61, (1, 9))
    here = torch.arange(9)[None]
    moved = {}
    for positions in ("rotary", "learned", "none"):
        model = make_model(family, positions=positions)
        difference = model(ids, position_ids=here + 20).logits - model(ids).logits
        moved[positions] = difference.abs().max().item()
    assert moved["none"] == 0
    assert moved["rotary"] < 1e-3 < moved["learned"]
    # Relative is not absent: other distances give other logits.
    model = make_model(family, positions="rotary")
    assert (model(ids, position_ids=here * 2).logits - model(ids).logits).abs().max() > 1e-3


def test_padding_on_either_side_is_invisible(make_model: Make, family: str) -> None:
    for positions in ("rotary", "learned", "none"):
        for kernel in ("sdpa", "eager"):
            model = make_model(family, positions=positions, attn_implementation=kernel)
            alone = torch.randint(1, 61, (1, 5))
            pad = torch.zeros(1, 4, dtype=torch.long)
            full = torch.randint(1, 61, (1, 9))
            expected = model(alone).logits[0]
            for padded, mask, kept in [
                (torch.cat((pad, alone), 1), [0] * 4 + [1] * 5, slice(4, 9)),
                (torch.cat((alone, pad), 1), [1] * 5 + [0] * 4, slice(0, 5)),
            ]:
                mask_ids = torch.tensor([mask, [1] * 9])
                logits = model(torch.cat((padded, full)), attention_mask=mask_ids).logits
                assert logits.isfinite().all()
                torch.testing.assert_close(logits[0, kept], expected, rtol=0, atol=1e-9)
                torch.testing.assert_close(logits[1], model(full).logits[0], rtol=0, atol=1e-9)


def test_packed_sequences_do_not_see_each_other(make_model: Make, family: str) -> None:
    """Positions that start again mark a new sequence, as everywhere in transformers."""
    model = make_model(family)
    first, second = torch.randint(61, (1, 4)), torch.randint(61, (1, 7))
    positions = torch.tensor([[*range(4), *range(7)]])
    packed = model(torch.cat((first, second), 1), position_ids=positions, use_cache=False).logits
    alone = torch.cat((model(first).logits, model(second).logits), 1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_hidden_states_are_those_between_the_blocks(
    make_model: Make, family: str, kernel: str
) -> None:
    for residual in ("sequential", "parallel"):
        model = make_model(family, attn_implementation=kernel, residual=residual)
        ids = torch.randint(61, (2, 7))
        seen: list[Tensor] = []
        hooks = [
            layer.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out))
            for layer in model.model.layers
        ]
        outputs = model(ids, output_hidden_states=True)
        for hook in hooks:
            hook.remove()
        assert len(outputs.hidden_states) == 3
        assert torch.equal(outputs.hidden_states[0], model.model.embed_tokens(ids))
        assert torch.equal(outputs.hidden_states[1], seen[0])
        # As in every model of transformers, the last one has passed the final norm.
        assert torch.equal(outputs.hidden_states[2], model.model.norm(seen[1]))
        assert torch.equal(model.lm_head(outputs.hidden_states[2]), outputs.logits)
        assert model(ids).hidden_states is None


@pytest.mark.parametrize("key_value_heads", [4, 2])
def test_eager_weights_match_sdpa(make_model: Make, family: str, key_value_heads: int) -> None:
    model = make_model(family, num_key_value_heads=key_value_heads)
    ids = torch.randint(61, (2, 7))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    attention = model.model.layers[1].attention
    caught: dict[str, Tensor] = {}
    hooks = [
        attention.v.register_forward_hook(lambda module, args, out: caught.update(v=out)),
        attention.o.register_forward_hook(
            lambda module, args, out: caught.update(attended=args[0])
        ),
    ]
    by_sdpa = model(ids, attention_mask=mask).logits
    for hook in hooks:
        hook.remove()
    model.set_attn_implementation("eager")
    outputs = model(ids, attention_mask=mask, output_attentions=True)
    torch.testing.assert_close(
        outputs.logits[mask.bool()], by_sdpa[mask.bool()], rtol=0, atol=1e-10
    )
    assert [weights.shape for weights in outputs.attentions] == [(2, 4, 7, 7)] * 2
    weights = outputs.attentions[1]
    torch.testing.assert_close(weights[1].sum(-1), torch.ones(4, 7).double())
    assert weights[1].triu(1).abs().max() == 0
    assert weights[0, :, 2:, :2].abs().max() == 0
    value = caught["v"].unflatten(-1, (key_value_heads, 8)).transpose(1, 2)
    value = value.repeat_interleave(4 // key_value_heads, dim=1)  # [B, H, T, head_dim]
    attended = (weights @ value).transpose(1, 2).flatten(-2)
    torch.testing.assert_close(
        attended[mask.bool()], caught["attended"][mask.bool()], rtol=0, atol=1e-10
    )


def test_attention_is_chosen_by_name(
    make_model: Make, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.randint(61, (1, 6))

    def first_token_only(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        assert options["scaling"] == 8**-0.5
        return value[:, :, :1].expand_as(query).transpose(1, 2), None

    model = make_model(family)
    expected = model(ids).logits
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "first_token_only", first_token_only)
    model.set_attn_implementation("first_token_only")
    assert (model(ids).logits - expected).abs().max() > 1e-3
    torch.testing.assert_close(model(ids[:, :1]).logits, expected[:, :1])
    model.set_attn_implementation("sdpa")
    assert torch.equal(model(ids).logits, expected)
    with pytest.raises(ValueError, match="fastest"):
        model.set_attn_implementation("fastest")


def test_loss_is_of_the_next_token_where_labeled(make_model: Make, family: str) -> None:
    model = make_model(family).float()
    ids = torch.randint(61, (3, 8))
    labels = ids.clone()
    labels[0, :5] = -100
    outputs = model(ids, labels=labels)
    each = F.cross_entropy(
        outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=-100, reduction="none"
    )
    wanted = int((labels[:, 1:] != -100).sum())
    assert wanted == 17
    torch.testing.assert_close(outputs.loss, each.sum() / wanted)
    # Parts of a batch, each divided by the whole batch's count, add up to the whole batch's loss.
    parts = [
        model(ids[rows], labels=labels[rows], num_items_in_batch=count).loss
        for rows, count in [(slice(0, 1), wanted), (slice(1, 3), torch.tensor(wanted))]
    ]
    torch.testing.assert_close(sum(parts), outputs.loss)
    assert model(ids).loss is None


def test_only_the_logits_asked_for(make_model: Make, family: str) -> None:
    model = make_model(family)
    ids = torch.randint(61, (2, 9))
    every = model(ids).logits
    assert every.shape == (2, 9, 61)
    for kept, index in [(0, slice(None)), (1, slice(-1, None)), (4, slice(-4, None))]:
        torch.testing.assert_close(model(ids, logits_to_keep=kept).logits, every[:, index])
    chosen = torch.tensor([0, 3, 8])
    torch.testing.assert_close(model(ids, logits_to_keep=chosen).logits, every[:, chosen])


def test_embeddings_may_come_from_outside(make_model: Make, family: str) -> None:
    model = make_model(family)
    ids = torch.randint(61, (2, 5))
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=embeds).logits, model(ids).logits)
    for wrong in ({}, {"input_ids": ids, "inputs_embeds": embeds}):
        with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
            model(**wrong)


def test_outputs_as_a_tuple(make_model: Make, family: str) -> None:
    model = make_model(family)
    ids = torch.randint(61, (2, 5))
    loss, logits = model(ids, labels=ids, use_cache=False, return_dict=False)
    named = model(ids, labels=ids, use_cache=False)
    assert named.past_key_values is None
    assert torch.equal(logits, named.logits)
    assert torch.equal(loss, named.loss)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_memory_only(
    make_model: Make, family: str, reentrant: bool
) -> None:
    model = make_model(family).train()
    ids = torch.randint(61, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(ids, attention_mask=mask, labels=ids).loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    runs = []
    hook = model.model.layers[0].attention.register_forward_hook(lambda *_: runs.append(1))
    expected = gradients()
    assert len(runs) == 1
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        # Reentrant checkpoints need an input that wants a gradient.
        model.enable_input_require_grads()
    runs.clear()
    again = gradients()
    hook.remove()
    assert len(runs) == 2, "the block was not recomputed in the backward pass"
    assert again.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(again[name], gradient, rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [70, 40])
def test_vocabulary_can_be_resized(make_model: Make, family: str, tied: bool, size: int) -> None:
    model = make_model(family, tie_word_embeddings=tied)
    ids = torch.randint(40, (2, 6))
    before = model(ids).logits
    model.resize_token_embeddings(size)
    outputs = model(ids, labels=ids)
    assert outputs.logits.shape == (2, 6, size)
    assert model.config.vocab_size == size
    shared = min(size, 61)
    torch.testing.assert_close(outputs.logits[..., :shared], before[..., :shared])
    assert outputs.loss.isfinite()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model.get_output_embeddings().weight.shape == (size, 32)


def test_half_precision_follows_full_precision(make_model: Make, family: str) -> None:
    model = make_model(family).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.4)
    ids = torch.randint(61, (2, 9))
    full = model(ids, labels=ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model(ids, labels=ids)
    mixed.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    half = model.bfloat16()(ids, labels=ids)
    assert half.logits.dtype == torch.bfloat16
    for outputs in (mixed, half):
        assert outputs.loss.dtype == torch.float32
        error = (outputs.logits.float() - full.logits).norm() / full.logits.norm()
        assert 0 < error < 0.03


def test_both_families_share_all_but_the_projections(make_model: Make) -> None:
    """The comparison is fair only if the two differ in nothing else."""
    names = {}
    for family in ("tokenformer", "transformer"):
        model = make_model(family, norm_parameters="weight_bias", positions="learned")
        maps = ("key_tokens", "value_tokens", "q.weight", "k.weight", "v.weight", "o.weight")
        maps = (*maps, "up.weight", "down.weight")
        names[family] = {n for n, _ in model.named_parameters() if not n.endswith(maps)}
    assert names["tokenformer"] == names["transformer"]
    assert len(names["tokenformer"]) == 1 + 1 + 2 * 4 + 2
