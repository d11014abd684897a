"""The share that a step trains depends only on seed and step."""

from collections import Counter

import pytest

import tokenformer
from tokenformer.train.nested_dropout import NestedDropout


def test_the_same_seed_and_step_give_the_same_share():
    one, same, other = NestedDropout(seed=3), NestedDropout(seed=3), NestedDropout(seed=4)
    shares = [one.share(step) for step in range(200)]
    assert [same.share(step) for step in reversed(range(200))] == shares[::-1]
    assert [other.share(step) for step in range(200)] != shares


def test_every_share_gets_its_part():
    nested = NestedDropout(shares=(0.25, 0.5, 1.0))
    counts = Counter(nested.share(step) for step in range(3000))
    assert set(counts) == {0.25, 0.5, 1.0}
    assert all(900 < count < 1100 for count in counts.values())


def test_every_layer_is_restricted_within_the_block(make_config):
    model = tokenformer.TokenformerForCausalLM(make_config("tokenformer"))
    nested = NestedDropout()
    for step in range(8):
        with nested.active(model, step) as share:
            assert share == nested.share(step)
            assert model.model.layers[1].ffn.active_tokens == 44 * share
            assert model.model.layers[0].attention.o.active_tokens == 20 * share
        assert model.model.layers[1].ffn.active_tokens is None


@pytest.mark.parametrize(
    ("shares", "message"),
    [((0.5,), "must contain 1.0"), ((0.0, 1.0), "shares=0.0"), ((1.5, 1.0), "shares=1.5")],
)
def test_shares_that_cannot_be_are_refused(shares, message):
    with pytest.raises(ValueError, match=message):
        NestedDropout(shares=shares)
