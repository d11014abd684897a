"""Perplexity against a direct computation: every token once, with enough context."""

import math

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tokenformer.data.byte_tokenizer import byte_tokenizer
from tokenformer.errors import DataError
from tokenformer.evaluate.perplexity import Perplexity, measure_perplexity, windows
from tokenformer.evaluate.tokenized_text import DECODE_TOKENS, TokenizedText, count_words

START = 60


@pytest.fixture
def model(make_model):
    return make_model("tokenformer")


@pytest.fixture
def tokens():
    return np.random.default_rng(0).integers(0, 60, 101).astype(np.uint16)


def direct(model, tokens, length, stride):
    """Score token by token, one forward pass each."""
    ids = [START, *tokens.tolist()]
    nats, begin, scored = 0.0, 0, 0
    for place in range(len(tokens)):
        if place >= scored + (length if scored == 0 else stride):
            scored += length if scored == 0 else stride
        end = min(len(tokens), scored + (length if scored == 0 else stride))
        begin = max(0, end - length)
        context = torch.tensor([ids[begin : place + 1]])
        logits = model(input_ids=context).logits[0, -1].double()
        nats -= logits.log_softmax(0)[ids[place + 1]].item()
    return nats


@pytest.mark.parametrize(
    ("length", "stride"), [(16, 16), (16, 8), (16, 5), (16, 1), (64, 32), (200, 100)]
)
def test_equals_a_direct_computation(model, tokens, length, stride):
    if length > model.config.max_position_embeddings:
        length, stride = 60, 30
    with torch.no_grad():
        expected = direct(model, tokens, length, stride)
    text = TokenizedText(tokens, bytes=77, words=20)
    for batch_size in (1, 3, None):
        found = measure_perplexity(
            model, text, start=START, length=length, stride=stride, batch_size=batch_size
        )
        assert found.nats == pytest.approx(expected, rel=1e-6)  # the losses are in fp32
        assert found.tokens == len(tokens)
    assert found.bits_per_byte == pytest.approx(expected / math.log(2) / 77, rel=1e-6)
    assert found.token_perplexity == pytest.approx(math.exp(expected / 101), rel=1e-6)
    assert found.word_perplexity == pytest.approx(math.exp(expected / 20), rel=1e-5)


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 50])
def test_every_token_is_scored_once_with_its_context(count):
    tokens = np.arange(count, dtype=np.uint16)
    scored = []
    for ids, fresh in windows(tokens, 999, 16, 6):
        assert len(ids) <= 17
        assert ids[0] == (999 if ids[1] == 0 else ids[1] - 1)
        if ids[-fresh] >= 16:
            assert len(ids) - fresh >= 16 - 6 + 1
        scored += ids[-fresh:].tolist()
    assert scored == list(range(count))


def test_progress_reaches_the_end(model, tokens):
    reported = []
    measure_perplexity(
        model, TokenizedText(tokens, 1, 1), start=0, length=8, on_tokens=reported.append
    )
    assert reported == sorted(reported)
    assert reported[-1] == len(tokens)


def test_refuses_an_empty_text_and_a_stride_that_would_leave_gaps(model, tokens):
    with pytest.raises(ValueError, match="stride=9"):
        measure_perplexity(model, TokenizedText(tokens, 1, 1), start=0, length=8, stride=9)
    with pytest.raises(ValueError, match="empty"):
        measure_perplexity(model, TokenizedText(tokens[:0], 0, 0), start=0, length=8)


def test_windows_may_exceed_rotary_but_not_learned_positions(make_model, tokens):
    text, windows = TokenizedText(tokens, 1, 1), {"start": START, "length": 80}
    assert measure_perplexity(make_model("tokenformer"), text, **windows).tokens == len(tokens)
    theirs = GPT2LMHeadModel(
        GPT2Config(vocab_size=61, n_embd=8, n_layer=1, n_head=1, n_positions=64)
    )
    for learned in (theirs, make_model("tokenformer", positions="learned")):
        with pytest.raises(DataError, match="has 64 positions, too few for windows of 80 tokens"):
            measure_perplexity(learned, text, **windows)


def test_a_perplexity_that_overflows_is_infinite():
    assert Perplexity(nats=1e6, tokens=10, bytes=10, words=1).word_perplexity == math.inf


def test_words_are_counted_across_decoded_parts():
    text = "naïve café  and\nmore words " * (DECODE_TOKENS // 20)
    tokens = np.frombuffer(text.encode(), dtype=np.uint8)
    assert len(tokens) > DECODE_TOKENS
    assert count_words(tokens, byte_tokenizer()) == len(text.split())
