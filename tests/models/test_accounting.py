"""Accounting against the parameters, FLOPs and saved tensors that torch reports."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tokenformer.layers import Pattention, RoutedPattention
from tokenformer.models.accounting import (
    GROWTH_SIZES,
    activation_bytes,
    active_parameters,
    count_parameters,
    forward_flops,
    matching_transformer,
    state_bytes,
    training_flops,
)
from tokenformer.models.configuration import LanguageConfig, TokenformerConfig, TransformerConfig
from tokenformer.models.language import (
    LanguageModelForCausalLM,
    TokenformerForCausalLM,
    TransformerForCausalLM,
)
from tokenformer.models.presets import TOKENFORMER_PRESETS, TRANSFORMER_PRESETS

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
}
SHARED_OPTIONS: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": False},
    {"positions": "learned"},
    {"positions": "none", "residual": "parallel"},
    {"num_key_value_heads": 2},
    {"num_key_value_heads": 1, "positions": "learned", "norm_parameters": "bias"},
    {"norm_parameters": "weight_bias", "final_norm_parameters": "none"},
    {"norm": "rms_norm"},
    {"norm": "rms_norm", "norm_parameters": "weight", "residual": "parallel"},
    {"variant": "paper", "final_norm_parameters": "bias"},
]
TOKENFORMER_OPTIONS: list[dict[str, Any]] = [
    {"qkv_tokens": 20, "output_tokens": 28, "ffn_tokens": 50},
    {"qkv_tokens": [5, 9], "ffn_tokens": [30, 70], "k_tokens": 11, "v_tokens": [13, 3]},
    {"q_tokens": 6, "num_key_value_heads": 2, "tie_word_embeddings": False},
    {"theta": "softmax"},
    {"theta": "gelu_l2"},
    {"theta": "l1_gelu"},
]
ROUTED_OPTIONS: list[dict[str, Any]] = [
    {"active_groups": {"ffn": 3}, "group_size": 8, "router": "centroid"},
    {"active_groups": {"ffn": [2, None], "q": 3, "o": 1}, "group_size": 7, "router": "learned"},
    {"active_groups": {"ffn": 3, "k": 1}, "num_key_value_heads": 2, "theta_norm": "chosen"},
    {"active_groups": {"ffn": 3}, "theta": "gelu_l2", "router": "gated"},
    {"active_groups": {"ffn": 3, "v": 1}, "routed_bias": True, "num_key_value_heads": 2},
]
TRANSFORMER_OPTIONS: list[dict[str, Any]] = [
    {"intermediate_size": 50},
    {"mlp": "swiglu", "num_key_value_heads": 2},
]
CONFIGS: list[LanguageConfig] = [
    *(TokenformerConfig(**{**SMALL, **o}) for o in SHARED_OPTIONS + TOKENFORMER_OPTIONS),
    *(TransformerConfig(**{**SMALL, **o}) for o in SHARED_OPTIONS + TRANSFORMER_OPTIONS),
]


ROUTED = [
    TokenformerConfig(**{**SMALL, "ffn_tokens": 120, "qkv_tokens": 40, **o}) for o in ROUTED_OPTIONS
]


def build(config: LanguageConfig, backend: str = "auto") -> LanguageModelForCausalLM:
    tokens = isinstance(config, TokenformerConfig)
    model = TokenformerForCausalLM(config) if tokens else TransformerForCausalLM(config)
    for module in model.modules():
        if isinstance(module, Pattention) and not isinstance(module, RoutedPattention):
            module.backend = backend
    return model


def built_parameters(config: LanguageConfig) -> int:
    with torch.device("meta"):
        model = build(config)
    model.tie_weights()  # the meta device does not stop the head from being a tensor of its own
    return sum(parameter.numel() for parameter in model.parameters())


def difference(config: LanguageConfig) -> str:
    """What a config changes, as the name of its test case."""
    plain = type(config)(**SMALL).to_dict()
    changed = {k: v for k, v in config.to_dict().items() if plain.get(k) != v}
    return f"{config.model_type}-{changed}"


@pytest.mark.parametrize("config", CONFIGS + ROUTED, ids=difference)
def test_parameters_of_every_option(config: LanguageConfig) -> None:
    assert sum(count_parameters(config).values()) == built_parameters(config)


@pytest.mark.parametrize("name", TOKENFORMER_PRESETS)
def test_parameters_of_tokenformer_presets(name: str) -> None:
    config = TokenformerConfig.from_preset(name)
    assert sum(count_parameters(config).values()) == built_parameters(config)


@pytest.mark.parametrize("name", TRANSFORMER_PRESETS)
def test_parameters_of_transformer_presets(name: str) -> None:
    config = TransformerConfig.from_preset(name)
    assert sum(count_parameters(config).values()) == built_parameters(config)


def test_parameters_by_part() -> None:
    options = {**SMALL, "tie_word_embeddings": False, "positions": "learned"}
    config = TokenformerConfig(**options, norm_parameters="bias", num_key_value_heads=2)
    model = build(config)
    parts = dict.fromkeys(count_parameters(config), 0)
    homes = {
        "embed_tokens": "embedding",
        "positions": "positions",
        "attention.o": "output",
        "attention.": "qkv",
        "ffn.": "ffn",
        "norm": "norms",
        "lm_head": "head",
    }
    for name, parameter in model.named_parameters():
        parts[next(part for piece, part in homes.items() if piece in name)] += parameter.numel()
    assert count_parameters(config) == parts


@contextmanager
def counted_flops(model: LanguageModelForCausalLM) -> Iterator[FlopCounterMode]:
    # The counter sees nothing inside fused CPU attention.
    model.config._attn_implementation = "eager"
    counter = FlopCounterMode(display=False)
    with counter:
        yield counter


WIDE = {
    **SMALL,
    "vocab_size": 200,
    "hidden_size": 64,
    "num_hidden_layers": 3,
}
FLOP_CONFIGS = [
    TokenformerConfig(**WIDE),
    TokenformerConfig(**WIDE, num_key_value_heads=2, qkv_tokens=48, ffn_tokens=[90, 300, 10]),
    TokenformerConfig(**WIDE, theta="softmax", k_tokens=7, tie_word_embeddings=False),
    TransformerConfig(**WIDE),
    TransformerConfig(**WIDE, mlp="swiglu"),
    TransformerConfig(**WIDE, num_key_value_heads=1, positions="learned"),
]


@pytest.mark.parametrize("config", FLOP_CONFIGS, ids=difference)
@pytest.mark.parametrize(("batch_size", "length"), [(1, 40), (3, 17)])
def test_flops_agree_with_the_counter(config: LanguageConfig, batch_size: int, length: int) -> None:
    model = build(config, "reference")  # torch counts no products into given memory
    ids = torch.randint(config.vocab_size, (batch_size, length))
    with counted_flops(model) as forward:
        loss = model(ids, labels=ids, use_cache=False).loss
    with counted_flops(model) as backward:
        loss.backward()
    counted = forward.get_total_flops()
    expected = batch_size * sum(forward_flops(config, length).values())
    assert expected == pytest.approx(counted, rel=0.01)
    trained = batch_size * sum(training_flops(config, length).values())
    assert trained == pytest.approx(counted + backward.get_total_flops(), rel=0.01)


def test_flops_of_routed_layers_are_those_of_the_visited_tokens() -> None:
    """The counter sees the products per group, the router and the norm."""
    options = {**SMALL, "hidden_size": 32, "ffn_tokens": [2048, 1024], "active_groups": {"ffn": 4}}
    config = TokenformerConfig(**options, group_size=16)
    model = build(config).eval()
    for layer in model.model.layers:
        layer.ffn.backend = "grouped"
    with counted_flops(model) as counter, torch.no_grad():
        model(torch.randint(config.vocab_size, (2, 40)), use_cache=False)
    flops = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    found = sum(flops[f"TokenformerForCausalLM.model.layers.{i}.ffn"] for i in range(2))
    assert found == pytest.approx(2 * forward_flops(config, 40)["ffn"], rel=0.01)
    dense = TokenformerConfig(**{**options, "active_groups": None})
    assert forward_flops(config, 40)["ffn"] < 0.2 * forward_flops(dense, 40)["ffn"]


def test_active_parameters() -> None:
    config = TokenformerConfig(**SMALL, ffn_tokens=[100, 70], active_groups={"ffn": [2, 3]})
    total, active = count_parameters(config), active_parameters(config)
    assert total["routers"] == active["routers"] == 32 * (4 + 3)
    assert active["ffn"] == 2 * 32 * (64 + 70), "the last group of 32 is smaller"
    assert {**active, "ffn": total["ffn"]} == total
    assert active_parameters(CONFIGS[0]) == count_parameters(CONFIGS[0])


def test_flops_by_part_agree_with_the_counter() -> None:
    config = TokenformerConfig(**WIDE, qkv_tokens=48, output_tokens=20, ffn_tokens=90)
    model = build(config, "reference")
    with counted_flops(model) as counter, torch.no_grad():
        model(torch.randint(config.vocab_size, (1, 40)), use_cache=False)
    flops = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    layers = [f"{type(model).__name__}.model.layers.{i}" for i in range(config.num_hidden_layers)]
    qkv = sum(flops[f"{layer}.attention.{name}"] for layer in layers for name in "qkv")
    output = sum(flops[f"{layer}.attention.o"] for layer in layers)
    expected = {
        "qkv": qkv,
        "token_token": sum(flops[f"{layer}.attention"] for layer in layers) - qkv - output,
        "output": output,
        "ffn": sum(flops[f"{layer}.ffn"] for layer in layers),
        "head": flops[f"{type(model).__name__}.lm_head"],
    }
    assert forward_flops(config, 40) == pytest.approx(expected, rel=0.01)


def test_flops_of_the_papers_table() -> None:
    """Its totals, 2 N T + 4 L d T^2 with N all projections' weights, and the head per token."""
    length = 2048
    for name in GROWTH_SIZES:
        for config in (TokenformerConfig.from_preset(name), TransformerConfig.from_preset(name)):
            parts = count_parameters(config)
            N = parts["qkv"] + parts["output"] + parts["ffn"]
            d, layers = config.hidden_size, config.num_hidden_layers
            total = 2 * N * length + 4 * layers * d * length**2
            flops = forward_flops(config, length)
            assert sum(flops.values()) - flops["head"] == total
            assert flops["head"] == 2 * config.vocab_size * d * length


def test_token_token_flops_are_the_papers() -> None:
    """The Transformers' grow as it prints them, in units of 1e4 T^2; ours stay the same."""
    printed = {"124m": 3.6, "354m": 6.8, "757m": 10.1}
    for name, figure in printed.items():
        theirs = forward_flops(TransformerConfig.from_preset(name), 1)["token_token"]
        assert theirs / 1e4 == pytest.approx(figure, abs=0.1)
        assert forward_flops(TokenformerConfig.from_preset(name), 1)["token_token"] == 4 * 12 * 768


def kept_bytes(config: LanguageConfig, batch_size: int, length: int) -> int:
    """Bytes of the distinct storages that autograd saves in one forward pass with a loss."""
    model = build(config, "direct")
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}  # holding the tensors keeps their addresses from being used again

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in parameters:
            kept[address] = tensor
        return tensor

    ids = torch.randint(config.vocab_size, (batch_size, length))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids, labels=ids, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("config", CONFIGS, ids=difference)
def test_activations_match_autograd(config: LanguageConfig) -> None:
    for batch_size, length in [(2, 40), (8, 9)]:
        expected = sum(activation_bytes(config, batch_size, length).values())
        assert expected == kept_bytes(config, batch_size, length)


@pytest.mark.parametrize("config", ROUTED, ids=difference)
def test_activations_of_routed_layers_are_close_to_autograd(config: LanguageConfig) -> None:
    for batch_size, length in [(2, 40), (8, 9)]:
        expected = sum(activation_bytes(config, batch_size, length).values())
        assert expected == pytest.approx(kept_bytes(config, batch_size, length), rel=0.02)


def test_state_matches_adamw() -> None:
    config = TokenformerConfig(**SMALL)
    model = build(config)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(config.vocab_size, (1, 8))
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    weights = sum(p.nbytes for p in model.parameters())
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    states = optimizer.state.values()
    moments = sum(state["exp_avg"].nbytes + state["exp_avg_sq"].nbytes for state in states)
    expected = {"weights": weights, "gradients": gradients, "adamw_moments": moments}
    assert state_bytes(config) == expected


@pytest.mark.parametrize("name", GROWTH_SIZES)
def test_matching_transformer_of_a_growth_size_is_the_preset(name: str) -> None:
    config = TokenformerConfig.from_preset(name)
    assert matching_transformer(config).to_dict() == TransformerConfig.from_preset(name).to_dict()
    per_layer = TokenformerConfig.from_preset(name, ffn_tokens=[config.tokens("ffn", 0)] * 12)
    assert (
        matching_transformer(per_layer).hidden_size
        == TransformerConfig.from_preset(name).hidden_size
    )


def test_matching_transformer_keeps_the_options_of_a_growth_size() -> None:
    config = TokenformerConfig.from_preset("1.4b", vocab_size=512, norm_parameters="bias")
    preset = TransformerConfig.from_preset("1.4b", vocab_size=512, norm_parameters="bias")
    assert matching_transformer(config).to_dict() == preset.to_dict()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qkv_tokens": 500, "ffn_tokens": [3000, 10]},
        {"num_key_value_heads": 2, "tie_word_embeddings": False},
        {"qkv_tokens": 1, "output_tokens": 1, "ffn_tokens": 1, "vocab_size": 2},
    ],
)
def test_matching_transformer_has_the_closest_parameter_count(changes: dict[str, Any]) -> None:
    config = TokenformerConfig(**{**SMALL, **changes})
    found = matching_transformer(config)
    assert found.head_dim == config.head_dim
    assert found.num_hidden_layers == config.num_hidden_layers
    assert found.vocab_size == config.vocab_size
    assert found.tie_word_embeddings == config.tie_word_embeddings
    group = config.num_attention_heads // config.num_key_value_heads
    assert found.num_attention_heads == group * found.num_key_value_heads
    wanted = built_parameters(config)

    def distance(heads: int) -> int:
        options = {
            **found.to_dict(),
            "hidden_size": heads * config.head_dim,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // group,
            "intermediate_size": None,
        }
        return abs(sum(count_parameters(TransformerConfig(**options)).values()) - wanted)

    best = min(range(group, 40 * group, group), key=distance)
    assert found.num_attention_heads == best


@pytest.mark.parametrize("tokens", [16, 32, 64])
def test_matching_transformer_can_match_the_count_by_its_hidden_units(tokens: int) -> None:
    sizes = {"qkv_tokens": tokens, "output_tokens": tokens, "ffn_tokens": 4 * tokens}
    config = TokenformerConfig(
        vocab_size=257, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, **sizes
    )
    coarse, fine = (matching_transformer(config, match_ffn=match) for match in (False, True))
    wanted = built_parameters(config)
    assert fine.hidden_size == coarse.hidden_size
    assert abs(built_parameters(coarse) - wanted) > 0.1 * wanted
    assert built_parameters(fine) == pytest.approx(wanted, rel=0.01)


def test_other_configurations_are_refused() -> None:
    with pytest.raises(TypeError, match="TokenformerConfig or TransformerConfig"):
        count_parameters(LanguageConfig(**SMALL))
