"""A token through all blocks in native code says what the blocks say."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn
from transformers import DynamicCache

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
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Of each forward of the blocks, whether it was such a step."""
    seen: list[bool] = []

    def watched(*arguments: Any) -> Tensor | None:
        found = native_decoder.decode_token(*arguments)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(language, "decode_token", watched)
    return seen


def speak(model: Any, ids: Tensor, tokens: int = 40, **options: Any) -> Any:
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


def prompt(length: int = 5) -> Tensor:
    return torch.randint(1, 61, (1, length), generator=torch.Generator().manual_seed(1))


def assert_true(model: Any, said: Any, start: int, tolerance: float = 2e-5) -> None:
    """The logits of every token are those of the whole text read anew, in float64."""
    truth = copy.deepcopy(model).double()
    for layer in truth.modules():
        layer._forward_hooks.clear()
    with torch.no_grad():
        wanted = truth(said.sequences, use_cache=False).logits[0, start - 1 : -1]
    found = torch.cat(said.logits)
    assert (found - wanted).abs().max() < tolerance * wanted.abs().max()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("length", [1, 5])
def test_every_kind_of_model(make_model: Make, taken: list[bool], options: Any, length: int):
    model = make_model("tokenformer", tie_word_embeddings=False, **options).float()
    said = speak(model, prompt(length))
    assert taken == [False] + 39 * [True], "the prompt by the blocks, the rest not"
    # Random softmax layers are steep.
    assert_true(model, said, length, 2e-3 if options.get("theta") == "softmax" else 2e-5)


def test_half_precision(make_model: Make, taken: list[bool]):
    model = make_model("tokenformer", tie_word_embeddings=False).bfloat16()
    said = speak(model, prompt())
    assert all(taken[1:])
    assert said.past_key_values.layers[0].keys.dtype == torch.bfloat16
    truth = copy.deepcopy(model).double()
    with torch.no_grad():
        wanted = truth(said.sequences, use_cache=False).logits[0, 4:-1]
        plain = model(said.sequences, use_cache=False).logits[0, 4:-1]
    error, usual = ((t - wanted).abs().mean() for t in (torch.cat(said.logits), plain))
    assert error < 1.2 * usual, "no worse than the blocks"


def test_hooks_see_every_token(make_model: Make, taken: list[bool]):
    model = make_model("tokenformer").float()
    seen: list[int] = []
    hook = model.model.layers[1].ffn.register_forward_hook(
        lambda module, inputs, output: seen.append(output.shape[1])
    )
    speak(model, prompt(), 6)
    assert seen == [5, 1, 1, 1, 1, 1]
    assert not any(taken)
    hook.remove()
    speak(model, prompt(), 6)
    assert len(seen) == 6
    assert any(taken)


def test_hidden_states_and_attentions_are_handed_out(make_model: Make, taken: list[bool]):
    model = make_model("tokenformer").float()
    said = speak(model, prompt(), 4, output_hidden_states=True)
    assert [len(states) for states in said.hidden_states] == 4 * [3]
    assert not any(taken)
    speak(model, prompt(), 4)
    assert taken[-3:] == 3 * [True], "the hooks of transformers are still there, and asleep"
    model.set_attn_implementation("eager")
    said = speak(model, prompt(), 4, output_attentions=True)
    assert [weights[0].shape[-1] for weights in said.attentions] == [5, 6, 7, 8]


class Louder(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return 3 * values


def test_what_only_python_can_do_is_left_to_it(make_model: Make, taken: list[bool]):
    for change in (
        lambda ffn: nn.utils.parametrize.register_parametrization(ffn, "value_tokens", Louder()),
        lambda ffn: setattr(ffn, "active_tokens", 11),
        lambda ffn: setattr(ffn, "backend", "reference"),
        lambda ffn: setattr(ffn, "scale_tokens", nn.Parameter(torch.tensor([30.0]))),
        lambda ffn: setattr(ffn, "eps", 1e-3),  # not that of the others
    ):
        model = make_model("tokenformer", tie_word_embeddings=False).float()
        speak(model, prompt(), 3)
        change(model.model.layers[1].ffn)
        taken.clear()
        assert_true(model, speak(model, prompt(), 8), 5)
        assert not any(taken)


def test_what_is_taken_back_is_forgotten(make_model: Make, taken: list[bool]):
    model = make_model("tokenformer", tie_word_embeddings=False).float()
    ffn = model.model.layers[1].ffn
    nn.utils.parametrize.register_parametrization(ffn, "value_tokens", Louder())
    speak(model, prompt(), 3)
    nn.utils.parametrize.remove_parametrizations(ffn, "value_tokens")
    assert not any(taken)
    assert_true(model, speak(model, prompt(), 3), 5)
    assert any(taken)


def test_parameters_that_others_took_away(make_model: Make, taken: list[bool]):
    """torch's own pruning leaves a layer its type, and its tokens as plain tensors."""
    model = make_model("tokenformer", tie_word_embeddings=False).float()
    nn.utils.prune.random_unstructured(model.model.layers[1].ffn, "key_tokens", 0.5)
    said = speak(model, prompt(), 8)
    assert not any(taken)
    with torch.no_grad():
        wanted = model(said.sequences, use_cache=False).logits[0, 4:-1]
    torch.testing.assert_close(torch.cat(said.logits), wanted, rtol=1e-4, atol=1e-4)


def test_hooks_on_all_modules_see_every_token(make_model: Make, taken: list[bool]):
    model = make_model("tokenformer").float()
    seen: list[str] = []
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: seen.append(type(module).__name__)
    )
    speak(model, prompt(), 6)
    hook.remove()
    assert seen.count("Pattention") == 6 * 2 * 5
    assert not any(taken)


def test_a_cache_that_goes_on_with_another_model(make_model: Make, taken: list[bool]):
    first, second = (make_model("tokenformer", tie_word_embeddings=False).float() for _ in "ab")
    with torch.no_grad():
        second.model.layers[0].ffn.value_tokens.mul_(-1)
    said = speak(first, prompt(), 6)
    ids = torch.cat([said.sequences, prompt(1)], dim=1)
    cache, other = said.past_key_values, copy.deepcopy(said.past_key_values)
    found = speak(second, ids, 6, past_key_values=cache)
    assert taken[-1]
    second.model.layers[0].ffn.backend = "reference"
    wanted = speak(second, ids, 6, past_key_values=other)
    assert not taken[-1]
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(torch.cat(found.logits), torch.cat(wanted.logits), **close)


def test_neither_caches_nor_models_are_held(make_model: Make, tmp_path):
    model = make_model("tokenformer").float()
    cache = speak(model, prompt(), 6).past_key_values
    torch.save(cache, tmp_path / "cache.pt")
    watched = weakref.ref(model)
    del model
    gc.collect()
    assert watched() is None
    assert cache.get_seq_length() == 10


def test_other_defaults_of_torch(make_model: Make, taken: list[bool]):
    """Memory for native code is fp32 on the CPU, whatever torch would make."""
    model = make_model("tokenformer", tie_word_embeddings=False).float()
    torch.set_default_dtype(torch.bfloat16)
    try:
        said = speak(model, prompt())
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(taken[1:])
    assert_true(model, said, 5)


def test_threads_that_speak_with_one_model(make_model: Make):
    model = make_model("tokenformer", tie_word_embeddings=False, num_hidden_layers=4).float()
    prompts = [prompt(length) for length in (2, 3, 4, 5)]
    alone = [speak(model, ids).sequences for ids in prompts]
    with ThreadPoolExecutor(4) as pool:
        together = pool.map(lambda ids: speak(model, ids).sequences, prompts * 3)
        for found, wanted in zip(together, alone * 3, strict=True):
            assert torch.equal(found, wanted)


def test_a_cache_that_is_begun_anew(make_model: Make, taken: list[bool]):
    model = make_model("tokenformer", tie_word_embeddings=False).float()
    first = speak(model, prompt(), 12)
    first.past_key_values.reset()
    again = speak(model, prompt(), 12, past_key_values=first.past_key_values)
    assert torch.equal(again.sequences, first.sequences)
    assert sum(taken) == 22


def test_guessing_ahead(make_model: Make):
    """Prompt lookup crops the cache wherever a guess was wrong."""
    model = make_model("tokenformer", tie_word_embeddings=False).float()
    bounds = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(prompt(9), **bounds)
    assert torch.equal(model.generate(prompt(9), prompt_lookup_num_tokens=3, **bounds), wanted)


def test_a_cache_under_autograd_keeps_its_graph(make_model: Make):
    model = make_model("tokenformer", tie_word_embeddings=False).float()
    cache = speak(model, prompt(), 4).past_key_values
    outputs = [model(prompt(2), past_key_values=cache).logits for _ in range(2)]
    torch.stack([out.sum() for out in outputs]).sum().backward()
    assert model.model.layers[0].ffn.key_tokens.grad.isfinite().all()


def test_a_forward_of_the_users_own_is_called(make_model: Make, taken: list[bool]):
    model = make_model("tokenformer", tie_word_embeddings=False).float()
    ffn = model.model.layers[1].ffn
    ffn.forward = lambda x: 3 * type(ffn).forward(ffn, x)
    said = speak(model, prompt(), 8)
    assert not any(taken)
    with torch.no_grad():
        wanted = model(said.sequences, use_cache=False).logits[0, 4:-1]
    torch.testing.assert_close(torch.cat(said.logits), wanted, rtol=1e-4, atol=1e-4)


def test_a_model_that_changes_while_its_cache_lives(make_model: Make, taken: list[bool]):
    """Weights in place, weights elsewhere, another layer, another scale: each is seen at once."""
    model = make_model("tokenformer", tie_word_embeddings=False).float()
    cache, other = (preallocate(DynamicCache(config=model.config)) for _ in range(2))
    ids = prompt(20)
    twin = copy.deepcopy(model.model.layers[0])
    twin.attention.layer_idx = 1  # whose keys are cached under
    ffn = model.model.layers[1].ffn
    changes = [
        lambda: ffn.key_tokens.mul_(-1),
        lambda: setattr(ffn.value_tokens, "data", -ffn.value_tokens.data),
        lambda: setattr(ffn, "key_tokens", nn.Parameter(-ffn.key_tokens.detach())),
        lambda: setattr(ffn, "scale_tokens", 99.0),
        lambda: setattr(model.model.layers[0], "ffn", copy.deepcopy(ffn)),
        lambda: model.model.layers.__setitem__(1, twin),
        lambda: [setattr(m, "eps", 0.5) for m in model.modules() if hasattr(m, "theta")],
        lambda: model.bfloat16().float(),
        lambda: None,
    ]
    with torch.no_grad():
        for past in (cache, other):
            model(ids[:, :4], past_key_values=past)
        for place, change in enumerate(changes, start=4):
            change()
            new = ids[:, place : place + 1]
            found = model(new, past_key_values=cache).logits
            assert taken[-1]
            model.model.layers[0].ffn.backend = "reference"  # not by a step
            wanted = model(new, past_key_values=other).logits
            assert not taken[-1]
            model.model.layers[0].ffn.backend = "auto"
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


def test_a_copied_and_a_cropped_cache_go_on(make_model: Make, taken: list[bool]):
    model = make_model("tokenformer", tie_word_embeddings=False).float()
    first = speak(model, prompt(), 70)  # beyond the room that a cache begins with
    cache = first.past_key_values
    assert cache.get_seq_length() == 74
    for past in (copy.deepcopy(cache), cache):
        past.crop(-44)
        assert past.layers[0].keys.shape[-2] == past.layers[0].values.shape[-2] == 30
        said = speak(model, first.sequences[:, :31], 20, past_key_values=past)
        assert torch.equal(said.sequences, first.sequences[:, :51])
    assert sum(taken) >= 69 + 2 * 19


def test_a_cache_out_of_inference_mode_goes_on(make_model: Make, taken: list[bool]):
    model = make_model("tokenformer", tie_word_embeddings=False).float()
    with torch.inference_mode():
        first = speak(model, prompt(), 10)
    ids = first.sequences.clone()
    said = speak(model, ids, 10, past_key_values=first.past_key_values)
    assert_true(model, said, 15)
    assert sum(taken) >= 18


def test_beams_and_batches_as_with_a_plain_cache(make_model: Make):
    """Their caches are reordered and repeated; nothing of that is a step."""
    model = make_model("tokenformer", tie_word_embeddings=False).float()
    ids = torch.cat([prompt(), prompt() + 1]) % 61
    for options in ({"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}, {}):
        bounds = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, **options}
        found = model.generate(ids, **bounds)
        wanted = model.generate(ids, past_key_values=DynamicCache(config=model.config), **bounds)
        assert torch.equal(found, wanted)


def test_left_padding_is_no_step(make_model: Make, taken: list[bool]):
    model = make_model("tokenformer", tie_word_embeddings=False).float()
    ids = prompt()
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], 1)
    mask = (torch.arange(8) >= 3).long()[None]
    alone, beside = speak(model, ids, 9), speak(model, padded, 9, attention_mask=mask)
    assert torch.equal(alone.sequences[:, 5:], beside.sequences[:, 8:])
    assert sum(taken) == 8


def test_only_plain_caches_get_room(make_model: Make):
    config = make_model("tokenformer").config
    assert all(
        type(layer) is PreallocatedLayer
        for layer in preallocate(DynamicCache(config=config)).layers
    )
    filled = DynamicCache(config=config)
    filled.update(torch.ones(1, 4, 2, 8), torch.ones(1, 4, 2, 8), 0)
    assert not any(type(layer) is PreallocatedLayer for layer in preallocate(filled).layers)
    assert preallocate(None) is None
