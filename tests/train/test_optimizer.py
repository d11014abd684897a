import pytest
import torch
from torch import nn

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
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    found = {n: rates.get(id(p)) for n, p in model.named_parameters()}
    assert found == {
        "linear.weight": 1.0,
        "linear.bias": 0.2,
        "norm.weight": 2.0,
        "norm.bias": None,
    }
    assert not model["norm"].bias.requires_grad


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
    import tokenformer

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
