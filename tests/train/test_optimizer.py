from typing import Literal

import pytest
import torch
from torch import nn

import tokenformer
from tests.support.training import rates_by_name
from tokenformer.train.optimizer import make_optimizer, set_rate
from tokenformer.train.options import OptimizerOptions


def network() -> nn.Module:
    return nn.ModuleDict({"linear": nn.Linear(3, 2), "norm": nn.LayerNorm(2)})


def test_decay_falls_on_matrices_alone():
    model = network()
    groups = make_optimizer(model, OptimizerOptions(weight_decay=0.3)).param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert {n: decay[id(p)] for n, p in model.named_parameters()} == {
        "linear.weight": 0.3,
        "linear.bias": 0.0,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
    }


def test_rates_by_name_and_the_last_pattern_counts():
    model = network()
    options = OptimizerOptions(rates={"linear.*": 0.5, "*.bias": 0.1, "norm.bias": 0.0})
    optimizer = make_optimizer(model, options)
    set_rate(optimizer, 2.0)
    assert rates_by_name(optimizer, model) == {
        "linear.weight": 1.0,
        "linear.bias": 0.2,
        "norm.weight": 2.0,
        "norm.bias": None,
    }
    assert not model["norm"].bias.requires_grad


def test_the_rate_law_is_per_layer_and_projection(make_config):
    tokens = {"qkv_tokens": 8, "k_tokens": [4, 16], "output_tokens": 32, "ffn_tokens": [128, 2]}
    model = tokenformer.TokenformerForCausalLM(make_config("tokenformer", **tokens))
    options = OptimizerOptions(rate_law="tokens", reference_tokens=32, rates={"*.ffn.*": 0.1})
    optimizer = make_optimizer(model, options)
    set_rate(optimizer, 1.0)
    found = {n.removeprefix("model."): r for n, r in rates_by_name(optimizer, model).items()}
    expected = {}
    for layer, name, count in [
        *((layer, f"attention.{name}", 8) for layer in (0, 1) for name in "qv"),
        *((layer, "attention.o", 32) for layer in (0, 1)),
        *((layer, "attention.k", count) for layer, count in enumerate((4, 16))),
        *((layer, "ffn", count) for layer, count in enumerate((128, 2))),
    ]:
        pattern = 0.1 if name == "ffn" else 1.0
        expected[f"layers.{layer}.{name}.value_tokens"] = pattern * 32 / count
        expected[f"layers.{layer}.{name}.key_tokens"] = pattern * (32 / count) ** 0.5
    assert found == pytest.approx(dict.fromkeys(found, 1.0) | expected)
    assert expected.keys() <= found.keys()


@pytest.mark.parametrize(
    ("router", "factor"), [("gated", 0.25), ("learned", 0.25), ("centroid", 1)]
)
def test_routed_layers_under_the_rate_law(make_config, router, factor):
    """The tokens that a row visits count; routers learn more slowly."""
    routing = {"active_groups": {"ffn": 2}, "group_size": 8, "router": router}
    model = tokenformer.TokenformerForCausalLM(make_config("tokenformer", **routing))
    optimizer = make_optimizer(model, OptimizerOptions(rate_law="tokens", reference_tokens=32))
    set_rate(optimizer, 1.0)
    rates = rates_by_name(optimizer, model)
    assert rates["model.layers.0.ffn.value_tokens"] == 32 / 16
    expected = None if router == "centroid" else 0.25
    assert rates.get("model.layers.0.ffn.router.weight") == expected


def test_under_the_rate_law_a_step_on_the_values_moves_the_output_equally_with_any_tokens():
    """What the law is for: the first step of AdamW towards the same output for all rows."""

    def change(tokens: int, rate_law: Literal["none", "tokens"]) -> float:
        torch.manual_seed(0)
        layer = tokenformer.Pattention(64, 64, tokens)
        x = torch.randn(128, 64)
        optimizer = make_optimizer(
            layer, OptimizerOptions(rate_law=rate_law, rates={"key_tokens": 0.0}, weight_decay=0.0)
        )
        set_rate(optimizer, 1e-4)
        before = layer(x).detach()
        layer(x).sum().backward()
        optimizer.step()
        return (layer(x).detach() - before).norm().item()

    sizes = (16, 64, 256)
    plain, law = ([change(n, name) for n in sizes] for name in ("none", "tokens"))
    assert max(law) < 1.5 * min(law)
    assert plain[-1] > 8 * plain[0]


def test_a_reference_below_one_is_refused():
    with pytest.raises(ValueError, match="reference_tokens=0 must be at least 1"):
        OptimizerOptions(rate_law="tokens", reference_tokens=0)


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match=r"no parameter matches '\*.key_tokenz'"):
        make_optimizer(network(), OptimizerOptions(rates={"*.key_tokenz": 0.0}))


def test_a_model_frozen_whole_is_refused():
    with pytest.raises(ValueError, match="leave one to train"):
        make_optimizer(network(), OptimizerOptions(rates={"*": 0.0}))


def test_it_steps():
    model = network()
    optimizer = make_optimizer(model, OptimizerOptions(learning_rate=0.1))
    model["linear"](torch.ones(1, 3)).sum().backward()
    before = model["linear"].weight.clone()
    optimizer.step()
    assert (model["linear"].weight != before).all()


def test_a_learned_scale_moves_by_a_share_of_itself(make_config):
    model = tokenformer.TokenformerForCausalLM(make_config("tokenformer", learned_scale=True))
    optimizer = make_optimizer(model, OptimizerOptions(learning_rate=0.01))
    set_rate(optimizer, 0.01)
    scales = {n: p for n, p in model.named_parameters() if n.endswith("scale_tokens")}
    before = {name: scale.item() for name, scale in scales.items()}
    tokens = torch.randint(61, (2, 20))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    for name, scale in scales.items():
        assert abs(scale.item() - before[name]) == pytest.approx(0.01 * before[name], rel=0.2)
    groups = [
        g
        for g in optimizer.param_groups
        if any(p is s for p in g["params"] for s in scales.values())
    ]
    assert all(group["weight_decay"] == 0 for group in groups)
