"""LiGO trains its mixing, and training lowers the loss."""

import itertools

import pytest
import torch

import tokenformer
from tests.support.growth import logits, relative_change, trained_transformer
from tokenformer.growth.transformer import ligo


def batches(seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(10_000):
        yield torch.randint(20, (4, 24), generator=generator)


def loss(model):
    ids = next(batches(seed=1))
    with torch.no_grad():
        return model(input_ids=ids, labels=ids).loss.item()


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"mlp": "swiglu", "tie_word_embeddings": False, "num_key_value_heads": 2},
        {"positions": "learned", "norm_parameters": "weight_bias"},
    ],
    ids=str,
)
def test_more_steps_give_a_better_model(make_config, variant):
    model, optimizer = trained_transformer(make_config, **variant)
    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "intermediate_size": 70}
    few, report = tokenformer.grow(model, **sizes, method="ligo", batches=batches(), steps=1)
    many, _ = tokenformer.grow(model, **sizes, method="ligo", batches=batches(), steps=25)
    assert report.exact is False
    assert report.max_output_change > 1e-3
    assert loss(many) < loss(few)
    assert report.parameters_after == few.num_parameters()
    larger = tokenformer.grow_optimizer(optimizer, report)
    assert not larger.state, "an optimizer begins anew"
    assert larger.param_groups[0]["betas"] == (0.9, 0.95)
    held = {id(p) for group in larger.param_groups for p in group["params"]}
    assert held == {id(p) for p in few.parameters()}


def test_it_begins_near_the_function_that_is_there(make_config, monkeypatch):
    """Tiles without noise, before a step has moved them, are HyperCloning's."""
    monkeypatch.setattr(ligo, "INITIAL_NOISE", 0.0)
    model, _ = trained_transformer(make_config, torch.float64)
    grown, _ = tokenformer.grow(
        model, hidden_size=64, method="ligo", batches=batches(), steps=1, learning_rate=0.0
    )
    assert relative_change(logits(model), logits(grown)) < 1e-12
    assert all(not p.requires_grad or p.is_leaf for p in grown.parameters())


def test_batches_must_last(make_config):
    model, _ = trained_transformer(make_config)
    with pytest.raises(ValueError, match="batches ended after 2 of 3 steps"):
        tokenformer.grow(
            model,
            hidden_size=64,
            method="ligo",
            batches=itertools.islice(batches(), 2),
            steps=3,
        )
    with pytest.raises(ValueError, match="steps=0 must be"):
        tokenformer.grow(model, hidden_size=64, method="ligo", batches=batches(), steps=0)
