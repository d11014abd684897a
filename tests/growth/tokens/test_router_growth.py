"""Growing routed layers: more groups, as many active ones, the same output."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenformer
from tests.support.growth import trained_routed
from tokenformer.growth.model_folder import grow_folder
from tokenformer.layers.router import ROUTERS, balance_routers, routers


@pytest.fixture
def trained(make_config: Any) -> Any:
    """trained(**options): a routed model after some steps, and its optimizer."""
    return partial(trained_routed, make_config)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(60).reshape(2, 30)).logits


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("theta_norm", ["all", "chosen"])
@pytest.mark.parametrize("init", ["zero", "zero_value"])
def test_larger_and_the_same(trained: Any, router: str, theta_norm: str, init: str) -> None:
    model, _ = trained(torch.float64, router=router, theta_norm=theta_norm)
    before = logits(model)
    grown, report = tokenformer.grow(model, ffn_tokens=256, init=init)
    assert grown.config.active_groups == model.config.active_groups
    ffn = grown.model.layers[0].ffn
    assert (ffn.num_tokens, ffn.num_groups, ffn.active_groups) == (256, 32, 3)
    assert ffn.tokens_per_row == model.model.layers[0].ffn.tokens_per_row
    torch.testing.assert_close(logits(grown), before, rtol=1e-9, atol=1e-11)
    assert report.max_output_change < 1e-9
    assert all(part.change is None for part in report.parts if part.name.endswith("ffn"))


def test_softmax_grows_by_zero_keys_where_it_is_routed(trained: Any) -> None:
    """A token with a zero key has a weight in softmax, but no row chooses it."""
    model, _ = trained(torch.float64, theta="softmax", theta_norm="chosen")
    before = logits(model)
    grown, _ = tokenformer.grow(model, ffn_tokens=256)
    torch.testing.assert_close(logits(grown), before, rtol=1e-9, atol=1e-11)
    with pytest.raises(ValueError, match="with softmax a token with a zero key"):
        tokenformer.grow(model, ffn_tokens=256, qkv_tokens=96)


def test_random_new_groups_change_only_the_norm(trained: Any) -> None:
    model, _ = trained(theta_norm="chosen")
    grown, _ = tokenformer.grow(model, ffn_tokens=256, init="random", scale="frozen")
    torch.testing.assert_close(logits(grown), logits(model), rtol=1e-4, atol=1e-5)
    assert grown.model.layers[0].ffn.key_tokens[64:].std() > 0


@pytest.mark.parametrize("router", ["centroid", "learned"])
@pytest.mark.parametrize("init", ["zero", "random"])
def test_new_groups_come_into_use_and_learn(trained: Any, router: str, init: str) -> None:
    model, optimizer = trained(router=router, balance_rate=0.05)
    grown, report = tokenformer.grow(model, ffn_tokens=128, init=init)
    optimizer = tokenformer.grow_optimizer(optimizer, report)
    ffn = grown.train().model.layers[0].ffn
    used = []
    keys = ffn.key_tokens[64:].detach().clone()
    for _ in range(80):
        tokens = torch.randint(61, (4, 24))
        grown(input_ids=tokens, labels=tokens).loss.backward()
        used.append(ffn.router.counts[8:] > 0)
        optimizer.step()
        optimizer.zero_grad()
        balance_routers(grown)
    assert not used[0].any(), "at growth no row chooses a new group"
    assert torch.stack(used[-40:]).any(0).sum() >= 6
    assert (ffn.key_tokens[64:] != keys).any(1).float().mean() > 0.5


def test_the_optimizer_state_of_a_router_grows(trained: Any) -> None:
    model, optimizer = trained(router="learned")
    grown, report = tokenformer.grow(model, ffn_tokens=128)
    state = tokenformer.grow_optimizer(optimizer, report).state
    old = optimizer.state[model.model.layers[0].ffn.router.weight]["exp_avg"]
    new = state[grown.model.layers[0].ffn.router.weight]["exp_avg"]
    assert torch.equal(new[:8], old)
    assert (new[8:] == 0).all()


def test_on_disk_as_in_memory(trained: Any, tmp_path: Any) -> None:
    model, _ = trained(router="learned")
    model.save_pretrained(tmp_path / "small")
    expected, _ = tokenformer.grow(model, ffn_tokens=128, seed=3)
    grow_folder(tmp_path / "small", tmp_path / "large", ffn_tokens=128, seed=3)
    found = tokenformer.TokenformerForCausalLM.from_pretrained(tmp_path / "large")
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


def test_dense_layers_of_a_routed_model_grow_by_any_init(trained: Any) -> None:
    model, _ = trained(torch.float64)
    grown, _ = tokenformer.grow(model, qkv_tokens=48, init="clone")
    torch.testing.assert_close(logits(grown), logits(model), rtol=1e-9, atol=1e-11)
    assert all(router.num_groups == 8 for router in routers(grown))


def test_what_cannot_grow_is_named(trained: Any) -> None:
    model, _ = trained()
    with pytest.raises(ValueError, match="init='clone' changes old tokens, which ffn of layer 0"):
        tokenformer.grow(model, ffn_tokens=128, init="clone")
    partial, _ = trained(ffn_tokens=60)
    with pytest.raises(ValueError, match="has 60 tokens, and its last group"):
        tokenformer.grow(partial, ffn_tokens=128)
    still, _ = trained(balance_rate=0.0)
    with pytest.raises(ValueError, match=r"balance_rate=0: new groups .*config\.json"):
        tokenformer.grow(still, ffn_tokens=128)
    skipping, _ = trained(active_groups=None, thresholds={"ffn": [0.1, None]})
    with pytest.raises(ValueError, match=r"thresholds=.*grow the dense model"):
        tokenformer.grow(skipping, ffn_tokens=128)
