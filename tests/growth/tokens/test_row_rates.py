"""Learning rate factors of tokens survive growth, pruning and merging."""

import pytest
import torch

import tokenformer
from tests.support.growth import trained_tokenformer

PLACE = ("ffn", 1)


@pytest.fixture
def frozen(make_config):
    model, _ = trained_tokenformer(make_config)
    return tokenformer.grow(model, ffn_tokens=120, old_rate=0.0)[0]


def test_growth_freezes_the_old_and_later_growth_keeps_them_so(frozen, tmp_path):
    assert frozen.config.row_rates(*PLACE) == [0.0] * 96 + [1.0] * 24
    frozen.save_pretrained(tmp_path)
    again = tokenformer.TokenformerForCausalLM.from_pretrained(tmp_path)
    larger, _ = tokenformer.grow(again, ffn_tokens=130)
    assert larger.config.row_rates(*PLACE) == [0.0] * 96 + [1.0] * 34
    thawed, _ = tokenformer.grow(larger, ffn_tokens=131, old_rate=1.0)
    assert thawed.config.token_rates is None
    for init in ("clone", "shrink"):
        with pytest.raises(ValueError, match="frozen"):
            tokenformer.grow(frozen, ffn_tokens=240, init=init)
    with pytest.raises(ValueError, match="frozen"):
        tokenformer.grow(thawed, ffn_tokens=262, init="clone", old_rate=0.0)


def test_pruned_tokens_take_their_rates_with_them_and_frozen_ones_their_values(frozen):
    with torch.no_grad():
        frozen.model.layers[1].ffn.key_tokens[96:].normal_()
    batches = [torch.randint(20, (4, 24)) for _ in range(4)]
    smaller, report = tokenformer.prune(frozen, batches, keep=0.5)
    rows = report.mappings["model.layers.1.ffn.key_tokens"].rows.tolist()
    assert smaller.config.row_rates(*PLACE) == [0.0 if row < 96 else 1.0 for row in rows]
    kept = frozen.model.layers[1].ffn.value_tokens[rows]
    assert torch.equal(smaller.model.layers[1].ffn.value_tokens, kept)


def test_joined_tokens_keep_the_rates_of_their_models(make_config, frozen):
    model, _ = trained_tokenformer(make_config)
    other, _ = tokenformer.grow(model, ffn_tokens=100, old_rate=0.5, seed=7)
    joined, _ = tokenformer.merge(frozen, other)
    assert joined.config.row_rates(*PLACE) == [0.0] * 96 + [1.0] * 24 + [1.0] * 4
    back, _ = tokenformer.merge(other, frozen)
    assert back.config.row_rates(*PLACE) == [0.5] * 96 + [1.0] * 4 + [1.0] * 24


def test_rates_that_do_not_fit_are_refused(make_config):
    with pytest.raises(ValueError, match="has factors for 3 tokens; the layer has 44"):
        make_config("tokenformer", token_rates={"ffn": [[[3, 0.0]], None]})
    with pytest.raises(ValueError, match="unknown key 'up'"):
        make_config("tokenformer", token_rates={"up": [None, None]})
