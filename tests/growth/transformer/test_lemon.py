"""LEMON at widths that are not a multiple: padded norms, smaller eps, unequal shares."""

import pytest
import torch

import tokenformer
from tests.support.growth import (
    compute_gradients,
    expected_gradient,
    logits,
    relative_change,
    trained_transformer,
)


@pytest.mark.parametrize(("norm", "held"), [("layer_norm", "mean"), ("rms_norm", "zero")])
def test_the_stream_is_padded_by_what_the_norm_does_not_see(make_config, norm, held):
    model, _ = trained_transformer(make_config, torch.float64, norm=norm)
    grown, _ = tokenformer.grow(model, hidden_size=72, intermediate_size=90, method="lemon")
    old, new = model.model.embed_tokens.weight, grown.model.embed_tokens.weight
    assert torch.equal(new[:, :32], old)
    assert torch.equal(new[:, 32:64], old)
    expected = old.mean(1, keepdim=True) if held == "mean" else torch.zeros(61, 1).double()
    assert torch.allclose(new[:, 64:], expected.expand(61, 8))
    # On the copies the norm gives sqrt(72 / 64) times what it gave; on the others nothing.
    with torch.no_grad():
        ids = torch.arange(40)[None]
        was = model.model.layers[0].attention_norm(model.model.embed_tokens(ids))
        became = grown.model.layers[0].attention_norm(grown.model.embed_tokens(ids))
    assert torch.allclose(became[..., :32], was * (72 / 64) ** 0.5, rtol=1e-12)
    assert became[..., 64:].abs().max() < 1e-12
    assert grown.model.layers[0].attention.q.weight[:, 64:].std() > 0.1, "drawn, not zero"


def test_eps_shrinks_with_the_variance(make_config):
    """The one thing that would keep it from being exact, and by how much."""
    model, _ = trained_transformer(make_config, torch.float64)
    grown, _ = tokenformer.grow(model, hidden_size=48, method="lemon")
    assert grown.config.norm_eps == pytest.approx(1e-5 * 32 / 48)
    assert relative_change(logits(model), logits(grown)) < 1e-12
    for norm in [m for m in grown.modules() if type(m).__name__ == "LayerNorm"]:
        norm.eps = 1e-5
    assert 1e-7 < relative_change(logits(model), logits(grown)) < 1e-3
    doubled, _ = tokenformer.grow(model, hidden_size=64, method="lemon")
    assert doubled.config.norm_eps == 1e-5


def test_shares_differ_and_sum_to_one(make_config):
    model, _ = trained_transformer(make_config, torch.float64)
    grown, report = tokenformer.grow(model, intermediate_size=100, method="lemon")
    mapping = report.mappings["model.layers.0.ffn.down.weight"]
    totals = torch.zeros(40, dtype=torch.float64).index_add(0, mapping.columns, mapping.scale)
    assert torch.allclose(totals, torch.ones(40).double())
    assert len(set(mapping.scale.tolist())) == 100
    assert mapping.columns.bincount().tolist() == [3] * 20 + [2] * 20
    down = grown.model.layers[0].ffn.down.weight
    assert torch.allclose(
        down[:, 0] + down[:, 40] + down[:, 80], model.model.layers[0].ffn.down.weight[:, 0]
    )


@pytest.mark.parametrize("width", [64, 48])
def test_gradients_of_the_stream_follow_the_shares_but_for_what_a_norm_takes_out(
    make_config, width
):
    model, _ = trained_transformer(make_config, torch.float64)
    grown, report = tokenformer.grow(model, hidden_size=width, method="lemon")
    for each in (model, grown):
        compute_gradients(each)
    for name, parameter in grown.named_parameters():
        mapping, found = report.mappings[name], parameter.grad
        copied = ~mapping.is_new(found.shape, found.device)
        size = (found * copied).norm()
        by_share = ((found - expected_gradient(model, report, name)) * copied).norm() / size
        if name.split(".")[-2] in ("q", "k", "v", "up", "norm"):
            assert by_share < 1e-9, name  # reads the stream: exact
        else:
            assert by_share < 0.35, name  # writes to it
            if width == 64:
                evenly = mapping.gather(model.get_parameter(mapping.source).grad) / 2
                assert by_share < (found - evenly).norm() / size, name
