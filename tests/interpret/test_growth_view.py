"""Old and new tokens of a grown model, on tokens whose work is known."""

import pytest
import torch

import tokenformer
from tokenformer.interpret import growth_view, index_tokens, plot_growth


@pytest.fixture
def batches(seed):
    return [torch.randint(61, (4, 12))]


def test_new_tokens_do_nothing_at_first_and_something_once_trained(make_model, batches, tmp_path):
    grown, _ = tokenformer.grow(make_model("tokenformer"), ffn_tokens=[50, 44])
    view = growth_view(index_tokens(grown, batches))
    assert view.ages == [0, 1]
    old, new = (row for row in view if row.layer == "0.ffn")
    assert (old.tokens, new.tokens, new.dead) == (44, 6, 6)
    assert (new.work, new.norm_share, new.frequency, new.selectivity) == (0, 0, 0, 0)
    assert (old.work, old.norm_share) == pytest.approx((1, 1))
    assert (old.share, new.share) == pytest.approx((0.88, 0.12))
    assert [row.age for row in view if row.layer == "1.ffn"] == [0], "this layer has not grown"

    ffn = grown.model.layers[0].ffn
    with torch.no_grad():  # copies of old tokens, so half of them work as these do
        ffn.key_tokens[44:] = ffn.key_tokens[:6]
        ffn.value_tokens[44:] = ffn.value_tokens[:6]
    index = index_tokens(grown, batches)
    view = growth_view(index)
    old, new = (row for row in view if row.layer == "0.ffn")
    layer = index.layers["0.ffn"]
    assert new.work == pytest.approx(layer.work[:6].sum().item())
    assert old.work + new.work == pytest.approx(1)
    assert new.dead == int(layer.dead[:6].sum())
    assert "0.ffn" in str(view)
    assert view.asdict()[0]["layer"] == "0.q"
    plot_growth(view, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")
