"""The clearest tokens: the best by their score, and what their contexts share."""

from collections import Counter

import pytest
import torch

from tokenformer.data.byte_tokenizer import VOCAB_SIZE, byte_tokenizer
from tokenformer.interpret import ClearToken, Context, Token, Vocabulary, clearest_tokens
from tokenformer.interpret import index_tokens as make_index
from tokenformer.interpret.clear_tokens import MOST_OF_A_LAYER, by_score

TEXT = b"The [[quick]] brown fox & a <b>lazy</b> [[dog]] cost 5 pounds.\n" * 12


@pytest.fixture
def vocabulary():
    return Vocabulary(byte_tokenizer())


@pytest.fixture
def index(make_model, seed):
    model = make_model("tokenformer", vocab_size=VOCAB_SIZE)
    ids = torch.tensor(list(TEXT[:640])).view(16, 40)
    return make_index(model, ids.split(4))


def scores(index, vocabulary):
    """The score of every token that may be chosen, one by one."""
    found = {}
    for name in ("0.o", "0.ffn", "1.o", "1.ffn"):
        layer = index.layers[name]
        for number in range(len(layer)):
            contexts = index.contexts(Token(name, number), vocabulary)
            fired = [c.fired for c in contexts]
            if sum(c.weight >= index.summary.threshold for c in contexts) >= 2:
                agreement = Counter(fired).most_common(1)[0][1] / len(fired)
                found[Token(name, number)] = layer.selectivity[number].item() * agreement
    return found


def test_tokens_come_by_their_score(index, vocabulary):
    expected = scores(index, vocabulary)
    found = list(by_score(index, vocabulary))
    assert {each.token for each in found} == set(expected)
    assert [each.score for each in found] == pytest.approx(sorted(expected.values(), reverse=True))


def test_a_token_that_fires_once_is_not_clear(index, vocabulary):
    """Its other contexts, in which it does not fire, say nothing about it."""
    first = next(by_score(index, vocabulary)).token
    weights = index.layers[first.layer].top_weights[first.number]
    assert weights[1] >= index.summary.threshold
    weights[1:] = index.summary.threshold - 0.01
    assert first not in {each.token for each in by_score(index, vocabulary)}
    weights[1] = index.summary.threshold
    assert first in {each.token for each in by_score(index, vocabulary)}


def test_the_clearest_tokens_fire_at_different_texts(index, vocabulary):
    found = clearest_tokens(index, vocabulary, 8)
    assert len({each.fired for each in found}) == len(found)
    assert max(Counter(each.token.layer for each in found).values()) <= MOST_OF_A_LAYER
    best = max(scores(index, vocabulary).values())
    assert found[0].score == pytest.approx(best)
    assert [each.score for each in found] == sorted((e.score for e in found), reverse=True)
    assert all(each.contexts[0].weight >= index.summary.threshold for each in found)


@pytest.mark.parametrize(
    ("texts", "pattern"),
    [
        (["one </t", "two </t", "six </t", "no"], " </t"),
        (["ab", "ab", "cd", "cd"], ""),
        (["b", "ab", "ab", "ab"], "ab"),
        (["", "", ""], ""),
    ],
)
def test_a_pattern_is_the_text_that_most_contexts_share(texts, pattern):
    contexts = [Context(1.0, n, 0, [], text[:-1], text[-1:], "") for n, text in enumerate(texts)]
    assert ClearToken(Token("0.ffn", 0), 0.5, 1.0, contexts).pattern == pattern
