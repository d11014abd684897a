"""Decoding with a cache gives the tokens of decoding without one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

Make = Callable[..., Any]

SHAPES = [
    {"positions": positions, "num_key_value_heads": heads}
    for positions in ("rotary", "learned", "none")
    for heads in (4, 2)
]
LENGTHS = (1, 2, 5, 7)  # of the prompts in a left-padded batch
NEW = 11


@pytest.fixture(params=SHAPES, ids=str)
def model(request: pytest.FixtureRequest, make_model: Make, family: str) -> Any:
    return lively(make_model, family, **request.param)


def lively(make_model: Make, family: str, **options: Any) -> Any:
    """A model that goes on saying new things. With random weights a tied head repeats its input,
    and a bias before the head says one thing always."""
    talkative = {"tie_word_embeddings": False, "final_norm_parameters": "weight"}
    model = make_model(family, **{**talkative, "eos_token_id": None, **options})
    assert model.generation_config.eos_token_id is None
    return model


def prompts() -> list[Tensor]:
    return [torch.randint(1, 61, (1, length)) for length in LENGTHS]


def left_padded(rows: list[Tensor]) -> dict[str, Tensor]:
    longest = max(row.shape[1] for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, longest - row.shape[1] :] = row
        mask[index, longest - row.shape[1] :] = 1
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def greedy(model: Any, ids: Tensor, new: int = NEW) -> Tensor:
    """Greedy decoding by a full forward per token, without cache, padding or `generate`."""
    for _ in range(new):
        best = model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat((ids, best), dim=1)
    return ids


@torch.no_grad()
def test_greedy_decoding_agrees_token_by_token(model: Any) -> None:
    rows = prompts()
    truth = [greedy(model, row)[0, row.shape[1] :].tolist() for row in rows]
    # Were every prompt continued alike or by one token, agreement would prove nothing.
    assert len({tuple(tokens) for tokens in truth}) == len(rows)
    assert len({token for tokens in truth for token in tokens}) > len(rows)
    for options in (
        {"use_cache": False},
        {"cache_implementation": "dynamic"},
        {"cache_implementation": "static"},
    ):
        settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
        for row, expected in zip(rows, truth, strict=True):
            alone = model.generate(row, attention_mask=torch.ones_like(row), **settings)
            assert alone[0, row.shape[1] :].tolist() == expected, options
        batch = left_padded(rows)
        together = model.generate(**batch, **settings)
        assert together[:, batch["input_ids"].shape[1] :].tolist() == truth, options


@torch.no_grad()
def test_cached_logits_are_the_uncached_ones(model: Any) -> None:
    """In chunks of several sizes, with and without padding, with both caches."""
    batch = left_padded(prompts())
    ids = torch.cat((batch["input_ids"], torch.randint(1, 61, (len(LENGTHS), 6))), 1)  # [B, 13]
    padding = torch.cat((batch["attention_mask"], torch.ones(len(LENGTHS), 6).long()), 1)
    for mask in (None, padding):
        whole = model(ids, attention_mask=mask, use_cache=False).logits
        real = padding.bool() if mask is not None else torch.ones_like(ids).bool()
        for cache in (
            DynamicCache(config=model.config),
            StaticCache(config=model.config, max_cache_len=16),
        ):
            steps = []
            for start, end in [(0, 7), (7, 8), (8, 11), (11, 12), (12, 13)]:
                seen = None if mask is None else mask[:, :end]
                outputs = model(ids[:, start:end], attention_mask=seen, past_key_values=cache)
                assert outputs.past_key_values is cache
                steps.append(outputs.logits)
            assert int(cache.get_seq_length()) == 13
            torch.testing.assert_close(torch.cat(steps, 1)[real], whole[real], rtol=0, atol=1e-9)


@torch.no_grad()
def test_sampling_and_beams_do_not_depend_on_the_cache(make_model: Make, family: str) -> None:
    model = lively(make_model, family, num_key_value_heads=2)
    batch = left_padded(prompts())
    for settings in (
        {"do_sample": True, "top_k": 20, "temperature": 3.0},
        {"do_sample": False, "num_beams": 4},
        {"do_sample": False, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5},
        {"do_sample": True, "num_beams": 2, "temperature": 2.0},
    ):
        decoded = []
        for cache in ({"use_cache": False}, {"cache_implementation": "dynamic"}, {}):
            torch.manual_seed(5)
            decoded.append(
                model.generate(**batch, **settings, **cache, max_new_tokens=9, pad_token_id=0)
            )
        assert torch.equal(decoded[0], decoded[1])
        assert torch.equal(decoded[0], decoded[2])
        if settings["do_sample"]:
            torch.manual_seed(6)
            other = model.generate(**batch, **settings, max_new_tokens=9, pad_token_id=0)
            assert not torch.equal(other, decoded[0])


@torch.no_grad()
def test_beam_search_is_at_least_as_good_as_greedy(make_model: Make, family: str) -> None:
    model = lively(make_model, family)
    ids = torch.randint(1, 61, (1, 5))

    def log_probability(sequence: Tensor) -> float:
        logits = model(sequence).logits.log_softmax(-1)[0, 4:-1]
        return logits.gather(-1, sequence[0, 5:, None]).sum().item()

    mask = torch.ones_like(ids)
    settings = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    # As many beams as ids: of two new tokens no prefix is ever dropped.
    beams = model.generate(ids, **{**settings, "max_new_tokens": 2}, num_beams=61)
    pairs = torch.cartesian_prod(torch.arange(61), torch.arange(61))
    every = torch.cat((ids.expand(len(pairs), -1), pairs), 1)
    logits = model(every).logits.log_softmax(-1)[:, 4:6]
    best = logits.gather(-1, pairs[..., None]).sum((1, 2)).argmax()
    assert beams[0].tolist() == every[best].tolist()
    assert log_probability(beams) >= log_probability(greedy(model, ids, 2))


@torch.no_grad()
def test_generation_stops_at_the_end_of_a_document(make_model: Make, family: str) -> None:
    model = lively(make_model, family)
    ids = torch.randint(1, 61, (1, 5))
    decoded = greedy(model, ids)[0, 5:].tolist()
    # The first token that is not a repeat of an earlier one, so that it ends exactly there.
    end = max(index for index, token in enumerate(decoded) if token not in decoded[:index])
    assert end > 0
    ended = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=decoded[end],
        pad_token_id=0,
    )
    assert ended[0, 5:].tolist() == decoded[: end + 1]


@torch.no_grad()
def test_generation_from_embeddings(make_model: Make, family: str) -> None:
    model = lively(make_model, family)
    ids = torch.randint(1, 61, (1, 5))
    new = model.generate(
        inputs_embeds=model.get_input_embeddings()(ids),
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
    )
    assert new.tolist() == greedy(model, ids)[:, 5:].tolist()


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_a_padding_mask_as_long_as_the_static_cache(make_model: Make, positions: str) -> None:
    """A hand-written loop over a static cache gives one mask of the cache's length."""
    model = make_model("tokenformer", positions=positions)
    ids = torch.randint(1, 61, (2, 9))
    mask = torch.zeros(2, 16, dtype=torch.long)
    mask[:, :9] = 1
    mask[0, :2] = 0  # left padding
    expected = model(ids, attention_mask=mask[:, :9]).logits
    cache = StaticCache(config=model.config, max_cache_len=16)
    seen = []
    for start, stop in ((0, 5), (5, 8), (8, 9)):
        chunk = model(
            ids[:, start:stop],
            attention_mask=mask * (torch.arange(16) < stop),
            past_key_values=cache,
        )
        seen.append(chunk.logits)
    logits = torch.cat(seen, dim=1)
    torch.testing.assert_close(logits[1], expected[1])
    torch.testing.assert_close(logits[0, 2:], expected[0, 2:])
