"""Where each growth method puts the old weights."""

import torch

import tokenformer
from tests.support.growth import trained_transformer

Q, OUT, UP, DOWN = "attention.q", "attention.o", "ffn.up", "ffn.down"


def weight(model, layer, name):
    return model.get_parameter(f"model.layers.{layer}.{name}.weight").detach()


def test_net2net_copies_whole_heads_and_divides_by_replicas(make_config):
    model, _ = trained_transformer(make_config, torch.float64)
    grown, report = tokenformer.grow(model, hidden_size=96)
    rows = report.mappings["model.layers.0.attention.q.weight"].rows.view(12, 8)
    assert torch.equal(rows[:4].flatten(), torch.arange(32)), "the old heads first"
    assert torch.equal(rows, rows[:, :1] + torch.arange(8)), "a head is eight neighbours"
    values = report.mappings["model.layers.0.attention.v.weight"].rows
    assert torch.equal(values, rows.flatten()), "with its keys and values"
    replicas = rows.flatten().bincount()
    assert torch.allclose(
        report.mappings["model.layers.0.attention.o.weight"].scale,
        1 / replicas[rows.flatten()].double(),
    )
    other = report.mappings["model.layers.1.attention.q.weight"].rows
    assert not torch.equal(other, rows.flatten()), "each layer draws its own"
    stream = report.mappings["model.embed_tokens.weight"].columns
    assert stream.bincount().tolist() == [3] * 32
    assert torch.equal(report.mappings["model.norm.weight"].rows, stream)
    assert torch.allclose(grown.model.norm.weight, model.model.norm.weight[stream] / 3)


def test_net2net_deepens_by_layers_that_add_nothing_yet(make_config):
    model, _ = trained_transformer(make_config)
    grown, _ = tokenformer.grow(model, num_hidden_layers=4)
    for layer, source in ((0, 0), (2, 1)):
        assert torch.equal(weight(grown, layer, Q), weight(model, source, Q))
    for layer in (1, 3):
        assert not weight(grown, layer, OUT).any()
        assert not weight(grown, layer, DOWN).any()
        assert 0.15 < weight(grown, layer, Q).std() < 0.25, "as a new model's"


def test_block_padding_keeps_the_old_block_and_draws_the_rest(make_config):
    model, _ = trained_transformer(make_config, initializer_range=0.1)
    grown, _ = tokenformer.grow(model, hidden_size=64, num_hidden_layers=3, method="block_padding")
    for layer in (0, 1):
        old, new = weight(model, layer, UP), weight(grown, layer, UP)  # [40, 32] in [80, 64]
        assert torch.equal(new[:40, :32], old)
        for block in (new[40:, :32], new[:40, 32:], new[40:, 32:]):
            assert 0.09 < block.std() < 0.11
        residual_std = 2 / (3 * 64**0.5)
        assert 0.9 < weight(grown, layer, DOWN)[32:].std() / residual_std < 1.1
    assert 0.09 < weight(grown, 2, UP).std() < 0.11
    assert torch.equal(grown.model.norm.weight[:32], model.model.norm.weight)
    assert torch.equal(grown.model.norm.weight[32:], torch.ones(32))
    assert not grown.model.norm.bias[32:].any()


def test_hypercloning_tiles(make_config):
    model, _ = trained_transformer(make_config, torch.float64)
    sizes = {"hidden_size": 64, "intermediate_size": 120, "method": "hypercloning"}
    grown, _ = tokenformer.grow(model, **sizes)
    assert torch.allclose(weight(grown, 1, Q), weight(model, 1, Q).repeat(2, 2) / 2)
    assert torch.allclose(weight(grown, 1, UP), weight(model, 1, UP).repeat(3, 2) / 2)
    assert torch.allclose(weight(grown, 1, DOWN), weight(model, 1, DOWN).repeat(2, 3) / 3)
    embedding = model.model.embed_tokens.weight
    assert torch.equal(grown.model.embed_tokens.weight, embedding.repeat(1, 2))
    assert torch.allclose(grown.model.norm.bias, model.model.norm.bias.repeat(2) / 2)
    noisy, _ = tokenformer.grow(model, **sizes, noise=0.2)
    noise = weight(noisy, 1, Q) - weight(grown, 1, Q)
    assert torch.allclose(noise[:, :32], -noise[:, 32:], atol=1e-15)
    assert not torch.allclose(noise[:32], noise[32:], atol=1e-3)
    assert noise[:, :32].std() > 0.05 * weight(grown, 1, Q).std()


def test_stacking_repeats_the_layers(make_config):
    model, optimizer = trained_transformer(make_config)
    grown, report = tokenformer.grow(model, num_hidden_layers=5, method="stacking")
    larger = tokenformer.grow_optimizer(optimizer, report)
    for layer, source in enumerate([0, 1, 0, 1, 0]):
        for name in (Q, OUT, UP, DOWN):
            assert torch.equal(weight(grown, layer, name), weight(model, source, name))
        new = grown.model.layers[layer].ffn.up.weight
        old = model.model.layers[source].ffn.up.weight
        assert torch.equal(larger.state[new]["exp_avg"], optimizer.state[old]["exp_avg"])


def test_aki_takes_new_rows_from_the_next_layer(make_config):
    model, _ = trained_transformer(make_config, torch.float64, num_hidden_layers=3)
    own, _ = tokenformer.grow(model, hidden_size=64, method="bert2bert_fpi", seed=4)
    next_, report = tokenformer.grow(model, hidden_size=64, method="bert2bert_aki", seed=4)
    fpi = tokenformer.grow(model, hidden_size=64, method="bert2bert_fpi", seed=4)[1]
    for layer in (0, 1):
        for name in (Q, UP, OUT, DOWN):
            before = len(weight(model, layer, name))
            made, kept = weight(next_, layer, name), weight(own, layer, name)
            assert torch.equal(made[:before], kept[:before])
            path = f"model.layers.{layer}.{name}.weight"
            above = fpi.mappings[path].apply(weight(model, layer + 1, name))
            assert torch.equal(made[before:], above[before:])
            assert not torch.equal(made[before:], kept[before:])
            assert (report.mappings[path].rows[before:] == -1).all()
    for name in (Q, UP, OUT, DOWN):
        assert torch.equal(weight(next_, 2, name), weight(own, 2, name)), "nothing is above"
