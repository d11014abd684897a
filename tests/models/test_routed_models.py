"""Models with routed projections: saving, loading, generation, training, refusals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tokenformer
from tokenformer import TokenformerForImageClassification, TokenformerVisionConfig
from tokenformer.layers import Pattention, RoutedPattention
from tokenformer.layers.router import ROUTERS, routers

Make = Callable[..., Any]
ROUTED = {"active_groups": {"ffn": 3, "o": [None, 2]}, "group_size": 8, "router": "centroid"}
kinds = pytest.mark.parametrize("router", ROUTERS)


def test_the_layers_named_in_the_configuration_are_routed(make_model: Make) -> None:
    model = make_model("tokenformer", **{**ROUTED, "router": "learned"}, balance_rate=0.02)
    first, second = model.model.layers
    assert type(first.attention.o) is Pattention
    assert type(first.attention.q) is Pattention
    for layer, groups, tokens in (
        (first.ffn, 3, 44),
        (second.ffn, 3, 44),
        (second.attention.o, 2, 20),
    ):
        assert isinstance(layer, RoutedPattention)
        assert (layer.active_groups, layer.num_tokens, layer.group_size) == (groups, tokens, 8)
        assert layer.norm == "all"
        assert layer.router.balance_rate == 0.02


def test_all_groups_are_the_dense_model(make_model: Make) -> None:
    dense = make_model("tokenformer").double().eval()
    routing = {"active_groups": {"ffn": 6}, "group_size": 8, "router": "learned"}
    routed = make_model("tokenformer", **routing).double().eval()
    routed.load_state_dict(dense.state_dict(), strict=False)
    ids = torch.arange(40).reshape(2, 20)
    torch.testing.assert_close(routed(ids).logits, dense(ids).logits)


@kinds
def test_save_and_load(make_model: Make, tmp_path: Path, router: str) -> None:
    model = make_model("tokenformer", **{**ROUTED, "router": router}).eval()
    for one in routers(model):
        one.bias.normal_()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert [one.bias.any() for one in routers(loaded)] == [True, True, True]


@kinds
def test_a_dense_checkpoint_gets_new_routers(
    make_model: Make, make_config: Make, tmp_path: Path, router: str
) -> None:
    """As transformers loads any model whose configuration has more weights than the file."""
    make_model("tokenformer").save_pretrained(tmp_path)
    config = make_config("tokenformer", **{**ROUTED, "router": router})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    assert all((one.bias == 0).all() for one in routers(loaded))
    weights = [one.weight for one in routers(loaded) if router != "centroid"]
    assert all(0.1 < weight.std() * 32**0.5 < 2 for weight in weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_generation_with_a_cache_equals_one_pass(make_model: Make, dtype: torch.dtype) -> None:
    """In fp32, native code reads the chosen groups."""
    model = make_model("tokenformer", **ROUTED).to(dtype).eval()
    ids = torch.arange(1, 9)[None]
    found = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert found.shape == (1, 16)
    with torch.no_grad():
        logits = model(found).logits
    assert torch.equal(logits[0, 7:-1].argmax(-1), found[0, 8:])


@kinds
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_with_checkpointing_and_autocast(
    make_model: Make, router: str, checkpointing: bool
) -> None:
    model = make_model("tokenformer", **{**ROUTED, "router": router})
    ids = torch.arange(60).reshape(2, 30)
    with torch.autocast("cpu", torch.bfloat16):
        model(ids, labels=ids).loss.backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    with torch.autocast("cpu", torch.bfloat16):
        model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, plain[name]), name


def test_image_classifier(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = TokenformerVisionConfig(
        image_size=8,
        patch_size=4,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_labels=3,
        ffn_tokens=64,
        active_groups={"ffn": 2},
        group_size=8,
        router="learned",
    )
    model = TokenformerForImageClassification(config)
    pixels = torch.randn(5, 3, 8, 8)
    model(pixels, labels=torch.tensor([0, 1, 2, 1, 0])).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.eval().save_pretrained(tmp_path)
    loaded = TokenformerForImageClassification.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(pixels).logits, model(pixels).logits)


@pytest.mark.slow
def test_compiles_whole(make_model: Make) -> None:
    torch._dynamo.reset()
    model = make_model("tokenformer", **ROUTED).train()
    ids = torch.arange(60).reshape(2, 30)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    losses = [one(ids, labels=ids, use_cache=False).loss for one in (compiled, model)]
    torch.testing.assert_close(*losses)


def test_prefixes_refuse_it(make_model: Make) -> None:
    model = make_model("tokenformer", **ROUTED)
    with pytest.raises(ValueError, match=r"active_groups=.*has no prefix.*tokenformer\.prune"):
        tokenformer.take_prefix(model, 0.5)
    with pytest.raises(ValueError, match="set its active_groups"):
        tokenformer.set_active_share(model, 0.5)
