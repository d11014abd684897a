"""The decoding loop gives what transformers' own loop gives, for all options of `generate`."""

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from tests.support.decoding import record_native_decoding
from tokenformer.models import decoding_loop, language
from tokenformer.models.quantization import quantize_model
from tokenformer.ops.backends.native.library import library

Make = Callable[..., Any]

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")

BOUNDS = {"max_new_tokens": 20, "pad_token_id": 0}
GREEDY = {**BOUNDS, "do_sample": False}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"eos_token_id": None},
    {"eos_token_id": list(range(1, 8))},
    {"do_sample": True},
    {"do_sample": True, "temperature": 2.5, "top_k": 9, "top_p": 0.8},
    {"do_sample": True, "min_p": 0.01, "eos_token_id": list(range(1, 8))},
    {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
    {"eos_token_id": list(range(1, 20)), "min_new_tokens": 6},
    {"bad_words_ids": [[index] for index in range(5, 40)]},
    {"max_new_tokens": 1},
    {"max_new_tokens": None, "max_length": 12},
    {"max_time": 100.0},
    {"use_cache": False},
    {"prefill_chunk_size": 3},
]


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    return record_native_decoding(monkeypatch)


@pytest.fixture
def model(make_model: Make) -> Any:
    return make_model("tokenformer", tie_word_embeddings=False, num_key_value_heads=2).float()


def prompts(rows: int, length: int = 6) -> Tensor:
    return torch.randint(1, 61, (rows, length), generator=torch.Generator().manual_seed(rows))


def with_transformers_loop(model: Any, *arguments: Any, **options: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding_loop, "supports", lambda *arguments: False)
        return model.generate(*arguments, **options)


def assert_same(model: Any, ids: Tensor, **options: Any) -> Tensor:
    everything = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    results = []
    for run in (model.generate, lambda *a, **b: with_transformers_loop(model, *a, **b)):
        torch.manual_seed(3)
        plain = run(ids, **options)
        torch.manual_seed(3)
        results.append((plain, run(ids, **options, **everything)))
    (found, details), (wanted, wanted_details) = results
    assert torch.equal(found, wanted)
    assert torch.equal(details.sequences, wanted_details.sequences)
    assert torch.equal(found, details.sequences)
    for name in ("scores", "logits"):
        pairs = zip(details[name], wanted_details[name], strict=True)
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in pairs)
    assert type(details) is type(wanted_details)
    assert details.keys() == wanted_details.keys()
    if options.get("use_cache", True):
        caches = [output.past_key_values for output in (details, wanted_details)]
        lengths = {cache.get_seq_length() for cache in caches}
        assert lengths == {found.shape[1] - 1}
        for layer, other in zip(*(cache.layers for cache in caches), strict=True):
            torch.testing.assert_close(layer.keys, other.keys, rtol=1e-4, atol=1e-4)
    return found


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_same_tokens(model: Any, native: list[bool], options: dict[str, Any], rows: int):
    found = assert_same(model, prompts(rows), **{**GREEDY, **options})
    assert any(native) == (options.get("use_cache", True) and found.shape[1] > 7)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8", "int8 in bf16"])
def test_number_formats(make_model: Make, native: list[bool], kind: str, rows: int):
    model = make_model("tokenformer", norm_parameters="weight_bias").float()
    if "int8" in kind:
        quantize_model(model)
    if "bf16" in kind:
        model.bfloat16()
    ids = prompts(rows)
    output = model.generate(ids, **GREEDY, return_dict_in_generate=True, output_logits=True)
    assert native == [False] + 19 * [True]
    model.model.layers[0].ffn.register_forward_hook(lambda *arguments: None)
    with torch.no_grad():
        wanted = model(output.sequences, use_cache=False).logits[:, 5:-1].float()
    close = 0.05 if "bf16" in kind else 1e-4
    found = torch.stack(output.logits, 1)
    assert (found - wanted).abs().max() < close * wanted.abs().max()
    best = found.argmax(-1)
    assert torch.equal(output.sequences[:, 6:], best), "no eos among them"


@pytest.mark.parametrize("positions", ["rotary", "learned", "none"])
def test_left_padding_and_ends(make_model: Make, native: list[bool], positions: str):
    """Rows of different lengths that end at different times are padded with the pad token."""
    model = make_model("tokenformer", tie_word_embeddings=False, positions=positions).float()
    ids = prompts(5, 9)
    mask = (torch.arange(9) >= torch.tensor([[0], [3], [8], [1], [0]])).long()
    ids = ids * mask
    options = {**GREEDY, "attention_mask": mask}
    free = model.generate(ids, **options, eos_token_id=None)
    eos = free[:, 15].tolist()  # in some rows from the sixth new token on
    found = assert_same(model, ids, **options, eos_token_id=eos)
    assert all(native[1:20])
    for row, kept in zip(range(5), mask.sum(1).tolist(), strict=True):
        alone = model.generate(ids[row : row + 1, 9 - kept :], **GREEDY, eos_token_id=eos)
        new = alone[0, kept:].tolist()
        assert found[row, 9 : 9 + len(new)].tolist() == new
        assert not found[row, 9 + len(new) :].any()


def test_masks_that_are_not_left_padding(model: Any, native: list[bool]):
    ids = prompts(2)
    mask = torch.ones_like(ids)
    mask[1, 3] = 0
    assert_same(model, ids, **GREEDY, attention_mask=mask)
    assert not any(native)


def test_position_ids_of_the_caller(model: Any, native: list[bool]):
    ids = prompts(2)
    positions = torch.arange(6) + torch.tensor([[7], [30]])
    mask = torch.ones_like(ids)
    plain = model.generate(ids, **GREEDY)
    found = assert_same(model, ids, **GREEDY, position_ids=positions, attention_mask=mask)
    assert all(native[21:40])
    assert torch.equal(plain, found), "rotations are relative"


def test_rotations_beyond_the_first_table(make_model: Make):
    model = make_model("tokenformer", tie_word_embeddings=False).float()
    assert_same(model, prompts(2), **{**GREEDY, "max_new_tokens": 300}, eos_token_id=None)


def test_ids_and_positions_without_embedding(make_model: Make):
    """Native code does not read beyond the end of an embedding."""
    model = make_model("tokenformer", tie_word_embeddings=False, positions="learned").float()

    class Wrong(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return torch.cat([scores, scores.amax(-1, keepdim=True) + 1], dim=-1)

    with pytest.raises(IndexError):
        model.generate(prompts(1), **GREEDY, logits_processor=LogitsProcessorList([Wrong()]))
    with pytest.raises(IndexError):
        model.generate(prompts(1), **{**GREEDY, "max_new_tokens": 100}, eos_token_id=None)


def test_a_cache_is_continued(model: Any, native: list[bool]):
    ids = prompts(2)
    whole = model.generate(ids, **{**GREEDY, "max_new_tokens": 30}, eos_token_id=None)
    details = {"return_dict_in_generate": True, "eos_token_id": None}
    first = model.generate(ids, **{**GREEDY, "max_new_tokens": 10}, **details)
    cache = first.past_key_values
    second = model.generate(first.sequences, **GREEDY, **details, past_key_values=cache)
    assert torch.equal(second.sequences, whole)
    assert second.past_key_values is cache
    assert all(native[1:30])
    cache = DynamicCache(config=model.config)  # the user's own, without preallocation
    assert torch.equal(model.generate(ids, **GREEDY, past_key_values=cache), whole[:, :26])


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.seen.append(value)

    def end(self) -> None:
        self.seen.append("end")


def test_streamers(model: Any):
    seen = []
    for run in (model.generate, lambda *a, **b: with_transformers_loop(model, *a, **b)):
        recorder = Recorder()
        run(prompts(1), **GREEDY, streamer=recorder)
        seen.append([x if isinstance(x, str) else x.tolist() for x in recorder.seen])
    assert seen[0] == seen[1]
    assert len(seen[0]) > 3


def test_criteria_see_scores_and_ids(model: Any):
    """A criterion of the user stops each row at its own length."""
    calls: list[list[Any]] = []

    class Lengths(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
            calls[-1].append((input_ids.tolist(), None if scores is None else len(scores)))
            return input_ids.shape[1] > torch.tensor([9, 14, 12])

    for run in (model.generate, lambda *a, **b: with_transformers_loop(model, *a, **b)):
        for details in ({}, {"return_dict_in_generate": True, "output_scores": True}):
            calls.append([])
            criteria = StoppingCriteriaList([Lengths()])
            run(prompts(3), **GREEDY, stopping_criteria=criteria, **details)
    assert calls[0] == calls[2]
    assert calls[1] == calls[3]
    assert len(calls[0]) == 9


def test_a_model_that_changes_while_it_generates(model: Any, native: list[bool]):
    """Hooks and weights that a processor sets apply from the next token on."""
    hooked: list[int] = []

    class Change(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            ffn, new = model.model.layers[1].ffn, input_ids.shape[1] - 6
            if new == 3:
                ffn.value_tokens.data = -ffn.value_tokens.data
            if new == 6:
                self.hook = ffn.register_forward_hook(lambda *arguments: hooked.append(new))
            if new == 9:
                self.hook.remove()
            if new == 12:
                ffn.value_tokens = torch.nn.Parameter(-ffn.value_tokens.detach())
            return scores

    change = {"logits_processor": LogitsProcessorList([Change()])}
    found = model.generate(prompts(2), **GREEDY, **change, eos_token_id=None)
    assert native == [False] + 6 * [True] + 3 * [False] + 10 * [True]
    wanted = with_transformers_loop(model, prompts(2), **GREEDY, **change, eos_token_id=None)
    assert torch.equal(found, wanted)
    assert hooked == 6 * [6]


def test_hooks_on_the_whole_model_see_every_token(model: Any, native: list[bool]):
    for module in (model, model.model, model.lm_head, model.model.norm, model.model.embed_tokens):
        seen: list[int] = []
        hook = module.register_forward_hook(lambda *arguments, seen=seen: seen.append(1))
        model.generate(prompts(1), **GREEDY, eos_token_id=None)
        hook.remove()
        assert len(seen) == 20


def test_a_subclass_with_its_own_forward(make_model: Make, native: list[bool]):
    model = make_model("tokenformer", tie_word_embeddings=False).float()
    calls: list[int] = []

    class Loud(type(model)):  # type: ignore[misc]
        def forward(self, *arguments: Any, **options: Any) -> Any:
            calls.append(1)
            return super().forward(*arguments, **options)

    model.__class__ = Loud
    model.generate(prompts(1), **GREEDY, eos_token_id=None)
    assert len(calls) == 20


def test_more_rows_than_native_code_takes(model: Any, native: list[bool]):
    assert_same(model, prompts(17), **GREEDY)
    assert not any(native)


def test_another_version_of_transformers(model: Any, monkeypatch: pytest.MonkeyPatch):
    """A loop that changed is not replaced."""
    monkeypatch.setitem(decoding_loop.PARAMETERS, "_sample", "self input_ids something new")
    decoding_loop.knows_transformers.cache_clear()
    try:
        assert not decoding_loop.knows_transformers()
        monkeypatch.setattr(decoding_loop, "decode", None)
        assert model.generate(prompts(1), **GREEDY).shape[1] > 6
    finally:
        decoding_loop.knows_transformers.cache_clear()


def test_the_installed_version_is_known():
    assert decoding_loop.knows_transformers()
    assert language.decoding_loop is decoding_loop


def test_no_tokens_after_the_time_limit(model: Any):
    class Slow(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            time.sleep(0.02)
            return scores

    slow = LogitsProcessorList([Slow()])
    found = model.generate(
        prompts(1), **{**GREEDY, "max_new_tokens": 10_000}, max_time=0.1, logits_processor=slow
    )
    assert 7 <= found.shape[1] <= 12


def test_keyboard_interrupt(make_model: Make):
    model = make_model("tokenformer", tie_word_embeddings=False).float()
    main = threading.main_thread().ident
    timer = threading.Timer(1.0, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        model.generate(prompts(1), **{**GREEDY, "max_new_tokens": 10**9}, eos_token_id=None)
