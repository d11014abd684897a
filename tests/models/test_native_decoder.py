"""Decoding in native code gives the logits of eager mode."""

import copy
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn
from transformers import DynamicCache

from tests.support.decoding import record_native_decoding
from tokenformer.models import language, native_decoder
from tokenformer.models.kv_cache import PreallocatedLayer, preallocate
from tokenformer.ops.backends.native.library import library

Make = Callable[..., Any]

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")

OPTIONS = [
    {},
    {"theta": "gelu_l2", "num_key_value_heads": 2},
    {"theta": "l1_gelu", "residual": "parallel"},
    {"theta": "softmax", "positions": "learned"},
    {"variant": "paper", "num_key_value_heads": 1},
    {"norm": "rms_norm", "norm_parameters": "weight_bias", "positions": "none"},
    {"norm_parameters": "bias", "qkv_tokens": [24, 7], "ffn_tokens": [5, 44]},
]


@pytest.fixture(autouse=True)
def several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_decoder, "threads_for", lambda size: 3)


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry per forward pass: whether native code ran its blocks."""
    return record_native_decoding(monkeypatch)


def generate(model: Any, ids: Tensor, tokens: int = 40, **options: Any) -> Any:
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


def prompt(length: int = 5, rows: int = 1) -> Tensor:
    return torch.randint(1, 61, (rows, length), generator=torch.Generator().manual_seed(1))


def assert_exact(model: Any, output: Any, start: int, tolerance: float = 2e-5) -> None:
    """Assert that the logits of every token match a float64 forward over the whole text."""
    truth = copy.deepcopy(model).double()
    for layer in truth.modules():
        layer._forward_hooks.clear()
    with torch.no_grad():
        wanted = truth(output.sequences, use_cache=False).logits[:, start - 1 : -1]
    found = torch.stack(output.logits, dim=1)
    assert (found - wanted).abs().max() < tolerance * wanted.abs().max()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("length", [1, 5])
def test_every_kind_of_model(make_model: Make, native: list[bool], options: Any, length: int):
    model = make_model("tokenformer", tie_word_embeddings=False, **options).float()
    output = generate(model, prompt(length))
    assert native == [False] + 39 * [True], "eager for the prompt, native afterwards"
    # Random softmax layers have large gradients.
    assert_exact(model, output, length, 2e-3 if options.get("theta") == "softmax" else 2e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("rows", [2, 3, 8, 16])
def test_batches(make_model: Make, native: list[bool], options: Any, rows: int):
    model = make_model("tokenformer", tie_word_embeddings=False, **options).float()
    output = generate(model, prompt(5, rows), 12)
    assert native == [False] + 11 * [True]
    assert_exact(model, output, 5, 2e-3 if options.get("theta") == "softmax" else 2e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_numbers_of_threads(make_model: Make, monkeypatch: pytest.MonkeyPatch, threads: int):
    monkeypatch.setattr(native_decoder, "threads_for", lambda size: threads)
    model = make_model("tokenformer", tie_word_embeddings=False, hidden_size=96).float()
    for rows in (1, 5, 16):
        assert_exact(model, generate(model, prompt(5, rows), 80), 5)  # the cache grows twice


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_forward_passes_of_a_padded_batch(make_model: Make, native: list[bool], options: Any):
    """Without `generate`: the blocks alone run in native code."""
    model = make_model("tokenformer", tie_word_embeddings=False, **options).float()
    ids, mask = prompt(20, 4), torch.ones(4, 20, dtype=torch.long)
    mask[1, :3] = mask[2, :5] = 0
    cache = preallocate(DynamicCache(config=model.config))
    with torch.no_grad():
        found = [model(ids[:, :6], attention_mask=mask[:, :6], past_key_values=cache).logits]
        for end in range(7, 21):
            seen = mask[:, :end]
            new = model(ids[:, end - 1 : end], attention_mask=seen, past_key_values=cache)
            found.append(new.logits)
        wanted = model.double()(ids, attention_mask=mask, use_cache=False).logits
    assert native == [False] + 14 * [True] + [False]
    error = (torch.cat(found, 1) - wanted)[mask.bool()].abs().max()
    assert error < (2e-3 if options.get("theta") == "softmax" else 2e-5) * wanted.abs().max()


def test_half_precision(make_model: Make, native: list[bool]):
    model = make_model("tokenformer", tie_word_embeddings=False).bfloat16()
    output = generate(model, prompt())
    assert all(native[1:])
    assert output.past_key_values.layers[0].keys.dtype == torch.bfloat16
    truth = copy.deepcopy(model).double()
    with torch.no_grad():
        wanted = truth(output.sequences, use_cache=False).logits[0, 4:-1]
        plain = model(output.sequences, use_cache=False).logits[0, 4:-1]
    error, usual = ((t - wanted).abs().mean() for t in (torch.cat(output.logits), plain))
    assert error < 1.2 * usual, "no worse than eager mode"


def test_hooks_see_every_token(make_model: Make, native: list[bool]):
    model = make_model("tokenformer").float()
    seen: list[int] = []
    hook = model.model.layers[1].ffn.register_forward_hook(
        lambda module, inputs, output: seen.append(output.shape[1])
    )
    generate(model, prompt(), 6)
    assert seen == [5, 1, 1, 1, 1, 1]
    assert not any(native)
    hook.remove()
    generate(model, prompt(), 6)
    assert len(seen) == 6
    assert any(native)


def test_hidden_states_and_attentions_are_returned(make_model: Make, native: list[bool]):
    model = make_model("tokenformer").float()
    output = generate(model, prompt(), 4, output_hidden_states=True)
    assert [len(states) for states in output.hidden_states] == 4 * [3]
    assert not any(native)
    generate(model, prompt(), 4)
    assert native[-3:] == 3 * [True], "the hooks of transformers remain but are inactive"
    model.set_attn_implementation("eager")
    output = generate(model, prompt(), 4, output_attentions=True)
    assert [weights[0].shape[-1] for weights in output.attentions] == [5, 6, 7, 8]


class Triple(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return 3 * values


def test_layers_that_need_python_run_in_eager_mode(make_model: Make, native: list[bool]):
    for change in (
        lambda ffn: nn.utils.parametrize.register_parametrization(ffn, "value_tokens", Triple()),
        lambda ffn: setattr(ffn, "active_tokens", 11),
        lambda ffn: setattr(ffn, "backend", "reference"),
        lambda ffn: setattr(ffn, "scale_tokens", nn.Parameter(torch.tensor([30.0]))),
        lambda ffn: setattr(ffn, "eps", 1e-3),  # differs from the other layers
    ):
        model = make_model("tokenformer", tie_word_embeddings=False).float()
        generate(model, prompt(), 3)
        change(model.model.layers[1].ffn)
        native.clear()
        assert_exact(model, generate(model, prompt(), 8), 5)
        assert not any(native)


def test_removing_a_parametrization_restores_native_decoding(make_model: Make, native: list[bool]):
    model = make_model("tokenformer", tie_word_embeddings=False).float()
    ffn = model.model.layers[1].ffn
    nn.utils.parametrize.register_parametrization(ffn, "value_tokens", Triple())
    generate(model, prompt(), 3)
    nn.utils.parametrize.remove_parametrizations(ffn, "value_tokens")
    assert not any(native)
    assert_exact(model, generate(model, prompt(), 3), 5)
    assert any(native)


def test_parameters_replaced_by_pruning(make_model: Make, native: list[bool]):
    """torch's pruning keeps the class of a layer but turns its tokens into plain tensors."""
    model = make_model("tokenformer", tie_word_embeddings=False).float()
    nn.utils.prune.random_unstructured(model.model.layers[1].ffn, "key_tokens", 0.5)
    output = generate(model, prompt(), 8)
    assert not any(native)
    with torch.no_grad():
        wanted = model(output.sequences, use_cache=False).logits[0, 4:-1]
    torch.testing.assert_close(torch.cat(output.logits), wanted, rtol=1e-4, atol=1e-4)


def test_hooks_on_all_modules_see_every_token(make_model: Make, native: list[bool]):
    model = make_model("tokenformer").float()
    seen: list[str] = []
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: seen.append(type(module).__name__)
    )
    generate(model, prompt(), 6)
    hook.remove()
    assert seen.count("Pattention") == 6 * 2 * 5
    assert not any(native)


def test_a_cache_continued_with_another_model(make_model: Make, native: list[bool]):
    first, second = (make_model("tokenformer", tie_word_embeddings=False).float() for _ in "ab")
    with torch.no_grad():
        second.model.layers[0].ffn.value_tokens.mul_(-1)
    output = generate(first, prompt(), 6)
    ids = torch.cat([output.sequences, prompt(1)], dim=1)
    cache, other = output.past_key_values, copy.deepcopy(output.past_key_values)
    found = generate(second, ids, 6, past_key_values=cache)
    assert native[-1]
    second.model.layers[0].ffn.backend = "reference"
    wanted = generate(second, ids, 6, past_key_values=other)
    assert not native[-1]
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(torch.cat(found.logits), torch.cat(wanted.logits), **close)


def test_no_reference_keeps_a_cache_or_model_alive(make_model: Make, tmp_path):
    model = make_model("tokenformer").float()
    cache = generate(model, prompt(), 6).past_key_values
    torch.save(cache, tmp_path / "cache.pt")
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    assert cache.get_seq_length() == 10


def test_another_default_dtype(make_model: Make, native: list[bool]):
    """Buffers for native code are fp32 on the CPU, whatever the defaults of torch."""
    model = make_model("tokenformer", tie_word_embeddings=False).float()
    torch.set_default_dtype(torch.bfloat16)
    try:
        output = generate(model, prompt())
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(native[1:])
    assert_exact(model, output, 5)


def test_threads_that_share_a_model(make_model: Make):
    model = make_model("tokenformer", tie_word_embeddings=False, num_hidden_layers=4).float()
    prompts = [prompt(length) for length in (2, 3, 4, 5)]
    alone = [generate(model, ids).sequences for ids in prompts]
    with ThreadPoolExecutor(4) as pool:
        together = pool.map(lambda ids: generate(model, ids).sequences, prompts * 3)
        for found, wanted in zip(together, alone * 3, strict=True):
            assert torch.equal(found, wanted)


def test_a_cache_that_is_reset(make_model: Make, native: list[bool]):
    model = make_model("tokenformer", tie_word_embeddings=False).float()
    first = generate(model, prompt(), 12)
    first.past_key_values.reset()
    again = generate(model, prompt(), 12, past_key_values=first.past_key_values)
    assert torch.equal(again.sequences, first.sequences)
    assert sum(native) == 22


def test_prompt_lookup_decoding(make_model: Make):
    """Prompt lookup crops the cache after every rejected candidate."""
    model = make_model("tokenformer", tie_word_embeddings=False).float()
    bounds = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(prompt(9), **bounds)
    assert torch.equal(model.generate(prompt(9), prompt_lookup_num_tokens=3, **bounds), wanted)


def test_a_cache_under_autograd_keeps_its_graph(make_model: Make):
    model = make_model("tokenformer", tie_word_embeddings=False).float()
    cache = generate(model, prompt(), 4).past_key_values
    outputs = [model(prompt(2), past_key_values=cache).logits for _ in range(2)]
    torch.stack([out.sum() for out in outputs]).sum().backward()
    assert model.model.layers[0].ffn.key_tokens.grad.isfinite().all()


def test_an_overridden_forward_is_called(make_model: Make, native: list[bool]):
    model = make_model("tokenformer", tie_word_embeddings=False).float()
    ffn = model.model.layers[1].ffn
    ffn.forward = lambda x: 3 * type(ffn).forward(ffn, x)
    output = generate(model, prompt(), 8)
    assert not any(native)
    with torch.no_grad():
        wanted = model(output.sequences, use_cache=False).logits[0, 4:-1]
    torch.testing.assert_close(torch.cat(output.logits), wanted, rtol=1e-4, atol=1e-4)


def test_a_model_that_changes_between_tokens(make_model: Make, native: list[bool]):
    """New weights in place or elsewhere, a new layer or scale: all take effect at once."""
    model = make_model("tokenformer", tie_word_embeddings=False).float()
    cache, other = (preallocate(DynamicCache(config=model.config)) for _ in range(2))
    ids = prompt(20)
    replacement = copy.deepcopy(model.model.layers[0])
    replacement.attention.layer_idx = 1  # its place in the cache
    ffn = model.model.layers[1].ffn
    changes = [
        lambda: ffn.key_tokens.mul_(-1),
        lambda: setattr(ffn.value_tokens, "data", -ffn.value_tokens.data),
        lambda: setattr(ffn, "key_tokens", nn.Parameter(-ffn.key_tokens.detach())),
        lambda: setattr(ffn, "scale_tokens", 99.0),
        lambda: setattr(model.model.layers[0], "ffn", copy.deepcopy(ffn)),
        lambda: model.model.layers.__setitem__(1, replacement),
        lambda: [setattr(m, "eps", 0.5) for m in model.modules() if hasattr(m, "theta")],
        lambda: model.bfloat16().float(),
        lambda: None,
    ]
    with torch.no_grad():
        for past in (cache, other):
            model(ids[:, :4], past_key_values=past)
        for index, change in enumerate(changes, start=4):
            change()
            new = ids[:, index : index + 1]
            found = model(new, past_key_values=cache).logits
            assert native[-1]
            model.model.layers[0].ffn.backend = "reference"  # forces eager mode
            wanted = model(new, past_key_values=other).logits
            assert not native[-1]
            model.model.layers[0].ffn.backend = "auto"
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


def test_a_copied_and_a_cropped_cache_continue(make_model: Make, native: list[bool]):
    model = make_model("tokenformer", tie_word_embeddings=False).float()
    first = generate(model, prompt(), 70)  # beyond the initial capacity of the cache
    cache = first.past_key_values
    assert cache.get_seq_length() == 74
    for past in (copy.deepcopy(cache), cache):
        past.crop(-44)
        assert past.layers[0].keys.shape[-2] == past.layers[0].values.shape[-2] == 30
        output = generate(model, first.sequences[:, :31], 20, past_key_values=past)
        assert torch.equal(output.sequences, first.sequences[:, :51])
    assert sum(native) >= 69 + 2 * 19


def test_a_cache_from_inference_mode_continues(make_model: Make, native: list[bool]):
    model = make_model("tokenformer", tie_word_embeddings=False).float()
    with torch.inference_mode():
        first = generate(model, prompt(), 10)
    ids = first.sequences.clone()
    output = generate(model, ids, 10, past_key_values=first.past_key_values)
    assert_exact(model, output, 15)
    assert sum(native) >= 18


def test_beams_and_batches_match_a_dynamic_cache(make_model: Make):
    """Beam search reorders and repeats the cache."""
    model = make_model("tokenformer", tie_word_embeddings=False).float()
    ids = torch.cat([prompt(), prompt() + 1]) % 61
    for options in ({"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}, {}):
        bounds = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, **options}
        found = model.generate(ids, **bounds)
        wanted = model.generate(ids, past_key_values=DynamicCache(config=model.config), **bounds)
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("positions", ["rotary", "learned", "none"])
def test_left_padding(make_model: Make, native: list[bool], positions: str):
    model = make_model("tokenformer", tie_word_embeddings=False, positions=positions).float()
    ids = prompt()
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], 1)
    mask = (torch.arange(8) >= 3).long()[None]
    alone, in_batch = generate(model, ids, 9), generate(model, padded, 9, attention_mask=mask)
    assert torch.equal(alone.sequences[:, 5:], in_batch.sequences[:, 8:])
    assert sum(native) == 16


def test_only_empty_dynamic_caches_are_preallocated(make_model: Make):
    config = make_model("tokenformer").config
    assert all(
        type(layer) is PreallocatedLayer
        for layer in preallocate(DynamicCache(config=config)).layers
    )
    filled = DynamicCache(config=config)
    filled.update(torch.ones(1, 4, 2, 8), torch.ones(1, 4, 2, 8), 0)
    assert not any(type(layer) is PreallocatedLayer for layer in preallocate(filled).layers)
    assert preallocate(None) is None


def test_training_and_prefill_do_not_look_for_native_code(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
):
    def fail(*arguments: Any) -> None:
        raise AssertionError("decode_token was called")

    monkeypatch.setattr(language, "decode_token", fail)
    model = make_model("tokenformer").float()
    model.eval()(prompt())
    model.train()(prompt(), labels=prompt()).loss.backward()
    model(prompt(1), use_cache=True)
