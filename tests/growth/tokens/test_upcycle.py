"""Sparse upcycling: copies of a trained layer, routed, that start as the layer they come from."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenformer
from tests.support.growth import train_once
from tokenformer.growth.tokens.upcycle import mean_gate, upcycle
from tokenformer.layers.router import balance_routers, routers
from tokenformer.ops import THETAS

IDS = torch.arange(60).reshape(2, 30)


@pytest.fixture
def dense(make_config: Any) -> Any:
    """dense(**options): a model after some steps, and its optimizer."""

    def make(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
        torch.manual_seed(0)
        config = make_config("tokenformer", **{"ffn_tokens": 48, **options})
        model = tokenformer.TokenformerForCausalLM(config).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(8):
            train_once(model, optimizer)
        return model, optimizer

    return make


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.parametrize("theta", THETAS)
def test_more_tokens_as_many_active_and_nearly_the_same(dense: Any, theta: str) -> None:
    model, _ = dense(theta=theta)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sparse, report = upcycle(model, 3, 8)
    ffn = sparse.model.layers[0].ffn
    assert (ffn.num_tokens, ffn.tokens_per_row, ffn.num_groups) == (144, 48, 18)
    assert type(sparse.model.layers[0].attention.q) is tokenformer.Pattention
    assert (logits(sparse) - logits(model)).abs().max() < 0.05 * logits(model).abs().max()
    assert report.max_output_change < 0.05
    assert report.parameters_after == sum(p.numel() for p in sparse.parameters())
    assert sparse.config.ages("ffn", 1) == [0] * 48 + [1] * 96
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("options", [{}, {"learned_scale": True}, {"theta": "gelu_l2"}])
@pytest.mark.parametrize("theta_norm", [None, "chosen"])
def test_with_gates_of_one_it_is_the_dense_model(
    dense: Any, options: dict[str, Any], theta_norm: str | None
) -> None:
    """Only the gates differ: every row chooses all groups of one copy."""
    model, _ = dense(torch.float64, **options)
    sparse, _ = upcycle(model, 4, 16, theta_norm=theta_norm)
    chosen = []
    for router in routers(sparse):
        router.register_forward_hook(lambda module, args, found: chosen.append(found[0]))
        router.weight.data.mul_(1e-9)  # the same order of the scores
    for layer in sparse.model.layers:
        layer.ffn.value_tokens.data.mul_(mean_gate(4))
    torch.testing.assert_close(logits(sparse), logits(model), rtol=1e-7, atol=1e-8)
    copies = torch.stack(chosen) // 3  # groups of a copy
    assert (copies == copies[..., :1]).all()
    assert len(copies.unique()) > 1, "different rows choose different copies"


def test_copies_become_different_and_rows_mix_them(dense: Any) -> None:
    model, optimizer = dense()
    sparse, report = upcycle(model, 2, 8, balance_rate=0.02)
    optimizer = tokenformer.grow_optimizer(optimizer, report)
    ffn = sparse.train().model.layers[0].ffn
    moments = optimizer.state[ffn.key_tokens]["exp_avg"]
    assert torch.equal(moments[:48] / moments[48:], torch.ones_like(moments[:48]))
    for _ in range(30):
        train_once(sparse, optimizer)
        balance_routers(sparse)
    assert not torch.allclose(ffn.key_tokens[:48], ffn.key_tokens[48:], atol=1e-3)
    groups = ffn.router(torch.randn(64, ffn.in_features), ffn.directions(), 6)[0]
    mixed = (groups < 6).float().mean(1)
    assert ((mixed > 0) & (mixed < 1)).any()


def test_save_and_load(dense: Any, tmp_path: Path) -> None:
    sparse, _ = upcycle(dense()[0], 2, 4, projections=("ffn", "o"))
    sparse.save_pretrained(tmp_path)
    loaded = tokenformer.TokenformerForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.active_groups == {"ffn": [12, 12], "o": [5, 5]}
    assert torch.equal(logits(loaded), logits(sparse))


def test_wrong_arguments_are_named(dense: Any) -> None:
    model, _ = dense()
    with pytest.raises(ValueError, match="copies=1 must be at least 2"):
        upcycle(model, 1)
    with pytest.raises(ValueError, match="group_size=0 must be at least 1"):
        upcycle(model, 2, 0)
    with pytest.raises(ValueError, match="group_size=32 must divide the 48 tokens of ffn"):
        upcycle(model, 2, 32)
    with pytest.raises(ValueError, match=r"projections=\['mlp'\]"):
        upcycle(model, 2, 16, projections=("mlp",))
    with pytest.raises(ValueError, match="projections is empty"):
        upcycle(model, 2, 16, projections=())
    sparse, _ = upcycle(model, 2, 16)
    with pytest.raises(ValueError, match="only the tokens of a dense model can be upcycled"):
        upcycle(sparse, 2, 16)
