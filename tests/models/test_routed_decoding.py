"""Routed models in native code: the logits and tokens of eager mode."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

import tokenformer
from tests.support.decoding import record_native_decoding
from tokenformer.layers import RoutedPattention
from tokenformer.layers.quantized_routing import Int8Router, QuantizedRouting
from tokenformer.layers.routed_pattention import GroupRouting
from tokenformer.layers.router import GatedRouter, LearnedRouter
from tokenformer.models import native_decoder
from tokenformer.models.kv_cache import preallocate
from tokenformer.models.quantization import quantize_model
from tokenformer.ops.backends.native.library import library

Make = Callable[..., Any]

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")

ALL = dict.fromkeys(("q", "k", "v", "o"), 2) | {"ffn": 3}
OPTIONS = [
    {"active_groups": {"ffn": 3}, "group_size": 8},
    {"active_groups": {"ffn": [None, 3]}, "group_size": 5, "router": "centroid"},
    {"active_groups": {"ffn": 3}, "group_size": 6, "router": "learned"},
    {"active_groups": ALL, "group_size": 7, "routed_bias": True, "num_key_value_heads": 2},
    {"active_groups": ALL, "group_size": 4, "theta_norm": "chosen", "residual": "parallel"},
    {"active_groups": {"q": 1, "ffn": 2}, "group_size": 8, "theta": "softmax"},
    {"active_groups": {"v": 1, "ffn": 2}, "group_size": 8, "theta": "gelu_l2"},
    {"active_groups": {"k": 1, "ffn": 2}, "group_size": 8, "theta": "l1_gelu"},
    {"active_groups": {"ffn": 6, "o": 1}, "group_size": 8, "theta_norm": "chosen"},
    {"active_groups": {"ffn": 1, "o": 1}, "group_size": 64, "routed_bias": True},
]
every_kind = pytest.mark.parametrize("options", OPTIONS, ids=str)


@pytest.fixture(autouse=True)
def several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_decoder, "threads_for", lambda size: 3)


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry per forward pass: whether native code ran its blocks."""
    return record_native_decoding(monkeypatch)


def make_routed(make_model: Make, **options: Any) -> Any:
    model = make_model("tokenformer", tie_word_embeddings=False, **options).float()
    for layer in routed_layers(model):
        layer.router.bias.normal_(std=0.3)
    return model


def routed_layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, GroupRouting)]


def generate(model: Any, ids: Tensor, tokens: int = 12, **options: Any) -> Any:
    return model.generate(
        ids,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )


def eager(model: Any) -> Any:
    """A copy that needs Python between its layers."""
    model = copy.deepcopy(model)
    model.model.layers[0].register_forward_hook(lambda *_: None)
    return model


def prompt(length: int = 5, rows: int = 1) -> Tensor:
    return torch.randint(1, 61, (rows, length), generator=torch.Generator().manual_seed(1))


@every_kind
def test_forward_passes_of_a_padded_batch(make_model: Make, native: list[bool], options: Any):
    model = make_routed(make_model, **options)
    for rows in (1, 4, 16):
        native.clear()
        ids, mask = prompt(16, rows), torch.ones(rows, 16, dtype=torch.long)
        mask[1:2, :3] = mask[2:3, :5] = 0
        cache = preallocate(DynamicCache(config=model.config))
        with torch.no_grad():
            found = [model(ids[:, :6], attention_mask=mask[:, :6], past_key_values=cache).logits]
            for end in range(7, 17):
                seen = mask[:, :end]
                new = model(ids[:, end - 1 : end], attention_mask=seen, past_key_values=cache)
                found.append(new.logits)
            truth = copy.deepcopy(model).double()
            wanted = truth(ids, attention_mask=mask, use_cache=False).logits
        assert native == [False] + 10 * [True] + [False]
        error = (torch.cat(found, 1) - wanted)[mask.bool()].abs().max()
        tolerance = 2e-3 if options.get("theta") == "softmax" else 2e-5
        assert error < tolerance * wanted.abs().max()


@every_kind
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_generates_the_tokens_of_eager_mode(
    make_model: Make, native: list[bool], options: Any, bits: int | None
):
    if bits == 4:
        options = {**options, "group_size": 32, "ffn_tokens": 290, "qkv_tokens": 90}
        options |= {"output_tokens": 64}
    model = make_routed(make_model, **options)
    if bits is not None:
        quantize_model(model, bits)
    for rows in (1, 3):
        native.clear()
        found = generate(model, prompt(5, rows))
        assert native == [False] + 11 * [True]
        wanted = generate(eager(model), prompt(5, rows))
        assert not any(native[12:])
        assert torch.equal(found.sequences, wanted.sequences)
        logits = [torch.stack(output.logits) for output in (found, wanted)]
        softmax = options.get("theta") == "softmax"
        torch.testing.assert_close(*logits, rtol=0, atol=2e-2 if softmax else 2e-3)


def test_half_precision(make_model: Make, native: list[bool]):
    model = make_routed(make_model, active_groups={"ffn": 3}, group_size=4).bfloat16()
    output = generate(model, prompt(), 40)
    assert all(native[1:])
    truth = copy.deepcopy(model).double()
    with torch.no_grad():
        wanted = truth(output.sequences, use_cache=False).logits[0, 4:-1]
        plain = model(output.sequences, use_cache=False).logits[0, 4:-1]
    # The median, because rounding may change the choice of a group at a few positions.
    error, usual = ((t - wanted).abs().mean(1).median() for t in (torch.cat(output.logits), plain))
    assert error < 1.2 * usual, "no worse than eager mode"


def test_equal_scores_choose_what_eager_mode_chooses(make_model: Make, native: list[bool]):
    """All groups have the same router rows, some a higher bias."""
    model = make_routed(make_model, active_groups={"ffn": 5}, group_size=3)
    for layer in routed_layers(model):
        with torch.no_grad():
            layer.router.weight.copy_(layer.router.weight[:1].clone())
            layer.router.bias.copy_((torch.arange(layer.num_groups) % 3 == 1).float())
    for bits in (None, 8):
        if bits:
            quantize_model(model, bits)
        found, wanted = generate(model, prompt()), generate(eager(model), prompt())
        assert any(native)
        assert torch.equal(found.sequences, wanted.sequences)
        router = model.model.layers[1].ffn.router
        groups, _ = router(torch.randn(7, 32), None, 5)
        assert (groups.sort().values == torch.tensor([1, 4, 7, 10, 13])).all()


def test_a_model_that_changes_between_tokens(make_model: Make, native: list[bool]):
    model = make_routed(make_model, active_groups={"ffn": 3}, group_size=8, routed_bias=True)
    model.model.layers[1].ffn = RoutedPattention(
        32, 32, 44, group_size=8, active_groups=2, router="centroid"
    ).eval()
    cache, other = (preallocate(DynamicCache(config=model.config)) for _ in range(2))
    ids = prompt(24)
    first, second = (layer.ffn for layer in model.model.layers)
    moved = RoutedPattention(32, 32, 44, group_size=8, active_groups=1).eval()
    changes = [
        lambda: second.key_tokens.mul_(-torch.rand(44, 1)),  # norm and centroids change
        lambda: first.router.bias.copy_(torch.randn(6)),
        lambda: first.router.update(torch.tensor([9, 0, 1, 2, 3, 4])),
        lambda: first.router.weight.mul_(-1),
        lambda: setattr(first.router, "weight", nn.Parameter(torch.randn(6, 32))),
        lambda: setattr(first, "router", LearnedRouter(6, 32, balance_rate=0.0)),
        lambda: setattr(first, "router", GatedRouter(6, 32, balance_rate=0.0)),
        lambda: setattr(first, "active_groups", 5),
        lambda: setattr(first, "norm", "chosen"),
        lambda: setattr(second, "active_groups", 0),
        lambda: first.bias.add_(1),
        lambda: first.load_state_dict(
            {n: torch.randn_like(t) for n, t in first.state_dict().items()}
        ),
        lambda: setattr(model.model.layers[0], "ffn", moved),
        lambda: model.eval(),
        lambda: None,
    ]
    with torch.no_grad():
        for past in (cache, other):
            model(ids[:, :4], past_key_values=past)
        for index, change in enumerate(changes, start=4):
            change()
            new = ids[:, index : index + 1]
            found = model(new, past_key_values=cache).logits
            assert native[-1], index
            model.model.layers[0].ffn.backend = "reference"  # forces eager mode
            wanted = model(new, past_key_values=other).logits
            assert not native[-1]
            model.model.layers[0].ffn.backend = "auto"
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3, msg=f"change {index}")


def test_what_needs_python_runs_in_eager_mode(make_model: Make, native: list[bool]):
    seen: list[int] = []
    for change in (
        lambda ffn: ffn.router.register_forward_hook(lambda *_: seen.append(1)),
        lambda ffn: setattr(ffn.router, "forward", ffn.router.forward),
        lambda ffn: setattr(ffn, "scale_tokens", nn.Parameter(torch.tensor([30.0]))),
        lambda ffn: ffn.train(),
        lambda ffn: setattr(ffn, "backend", "grouped"),
    ):
        model = make_routed(make_model, active_groups={"ffn": 3}, group_size=8)
        generate(model, prompt(), 3)
        assert native[-1]
        change(model.model.layers[1].ffn)
        native.clear()
        output = generate(model, prompt(), 6)
        assert not any(native)
        with torch.no_grad():
            wanted = model(output.sequences, use_cache=False).logits[0, 4:-1]
        torch.testing.assert_close(torch.cat(output.logits), wanted, rtol=1e-4, atol=1e-4)
    assert len(seen) == 6 + 1


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("router", ["gated", "learned", "centroid"])
def test_quantized_models_are_saved_and_loaded(
    make_model: Make, tmp_path: Path, router: str, bits: int
):
    options = {"group_size": 32, "ffn_tokens": 200, "routed_bias": True, "router": router}
    model = make_routed(make_model, active_groups={"ffn": 3, "o": [None, 1]}, **options)
    model.save_pretrained(tmp_path / "dense")
    config = tokenformer.TokenQuantization(bits=bits)
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    layers = routed_layers(small)
    assert all(isinstance(layer, QuantizedRouting) for layer in layers)
    assert all(isinstance(layer.router, Int8Router) for layer in layers)
    assert len(layers) == 3
    ids = prompt(20)
    with torch.no_grad():
        wanted, found = model(ids).logits, small(ids).logits
    assert 1e-4 < (found - wanted).norm() / wanted.norm() < (0.2 if bits == 8 else 0.7)
    small.save_pretrained(tmp_path / "small")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    with torch.no_grad():
        assert torch.equal(again(ids).logits, found)
    again.save_pretrained(tmp_path / "again")
    files = [tmp_path / name / "model.safetensors" for name in ("small", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.bfloat16)
    sequences = [generate(one, prompt()).sequences for one in (small, again)]
    assert torch.equal(*sequences)
    assert generate(half, prompt()).sequences.shape == sequences[0].shape
    assert routed_layers(half)[0].router.scales.dtype == torch.float32


def test_4_bits_need_whole_blocks(make_model: Make):
    model = make_routed(make_model, active_groups={"ffn": 3}, group_size=8)
    with pytest.raises(ValueError, match=r"group_size=8 cannot have 4 bits.*use bits=8"):
        quantize_model(model, 4)
