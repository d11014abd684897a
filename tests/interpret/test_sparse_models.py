"""Sparse models: tokens that a row skips have no weight, and the others have the gates."""

import pytest
import torch

import tokenformer
from tokenformer.interpret import (
    Behavior,
    Token,
    ablate_each,
    attribute,
    controlling_set,
    direct_effects,
    edit,
    index_tokens,
    intervene,
    score_maps,
)
from tokenformer.interpret.attribution import strongest
from tokenformer.interpret.context_weights import context_weights
from tokenformer.interpret.controlling_set import busiest_set
from tokenformer.interpret.token_name import named_layers
from tokenformer.layers import RoutedPattention
from tokenformer.layers.router import routers

IDS = torch.arange(24).view(2, 12)
CASES = [
    ("gated", "all", "l2_gelu"),
    ("learned", "chosen", "l2_gelu"),
    ("centroid", "all", "l2_gelu"),
    ("gated", "chosen", "gelu_l2"),
    ("gated", "chosen", "softmax"),
]
cases = pytest.mark.parametrize(("router", "theta_norm", "theta"), CASES)


@pytest.fixture
def make_sparse(make_model):
    """44 feed-forward tokens in groups of 8, the last of which has 4; o of the second block."""

    def make(router="gated", theta_norm="all", theta="l2_gelu", **options):
        routing = {"group_size": 8, "active_groups": {"ffn": 2, "o": [None, 1]}}
        routing |= {"router": router, "theta_norm": theta_norm, "theta": theta}
        return make_model("tokenformer", **(routing | options))

    return make


@pytest.fixture
def behavior(seed):
    ids = torch.randint(61, (16, 12))
    return Behavior.predicting(ids, lambda now, following: following < 12)


def outputs(model, ids=IDS):
    """The output of every layer, and the logits."""
    found, hooks = {}, []
    for name, layer in named_layers(model).items():
        record = lambda _, x, y, name=name: found.update({name: y})  # noqa: E731
        hooks.append(layer.register_forward_hook(record))
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    for hook in hooks:
        hook.remove()
    return found, logits


@cases
@pytest.mark.parametrize("bias", [False, True])
def test_score_maps_are_what_the_layers_compute(make_sparse, router, theta_norm, theta, bias):
    model = make_sparse(router, theta_norm, theta, routed_bias=bias)
    expected, _ = outputs(model)
    maps = score_maps(model, IDS)
    for name, layer in named_layers(model).items():
        shift = getattr(layer, "bias", None)
        found = maps[name].output if shift is None else maps[name].output + shift
        torch.testing.assert_close(found, expected[name])
        skipped = (maps[name].weights == 0).reshape(-1, layer.num_tokens)
        if isinstance(layer, RoutedPattention):
            active = (~skipped).unflatten(1, (-1, 4)).any(2).sum(1)  # by half of a group
            assert (active <= 2 * layer.active_groups).all()
            torch.testing.assert_close(maps[name].explained(24), torch.ones(2, 12).double())


def test_thresholds(make_model):
    model = make_model("tokenformer", thresholds={"ffn": [0.5, None]})
    expected, _ = outputs(model)
    maps = score_maps(model, IDS)
    for name, each in maps.items():
        torch.testing.assert_close(each.output, expected[name])
    skipped = maps["0.ffn"].weights == 0
    assert 0.05 < skipped.double().mean() < 0.95
    assert (maps["0.ffn"].contributions[~skipped] >= 0.5).all()


@cases
def test_direct_effects_and_interventions(make_sparse, router, theta_norm, theta):
    """Values are what is changed: gates, groups and norms stay as they are."""
    model = make_sparse(router, theta_norm, theta)
    maps = score_maps(model, IDS, ["1.ffn"])
    each = maps["1.ffn"]
    often = (each.weights != 0).flatten(0, 1).sum(0).argsort(descending=True)[:3].tolist()
    off, scaled, pinned = (Token("1.ffn", number) for number in often)
    weights = each.weights.clone()
    weights[..., off.number] = 0
    weights[..., scaled.number] *= -2.5
    weights[..., pinned.number] = 0.8
    before, logits = outputs(model)
    with intervene(model, off=[off], scale={scaled: -2.5}, pin={pinned: 0.8}):
        after, changed = outputs(model)
    torch.testing.assert_close(after["1.ffn"], weights @ each.values)
    assert not torch.allclose(changed, logits)
    assert torch.equal(outputs(model)[1], logits), "restored bit for bit"
    effects = direct_effects(model, maps, IDS)["1.ffn"]
    assert ((effects == 0) == (each.weights == 0)).all()
    with intervene(model, off=[off]):
        expected = outputs(model)[1]
    assert torch.equal(outputs(edit(model, off=[off]))[1], expected)
    assert before.keys() == after.keys()


def test_native_decoding_sees_an_intervention(make_sparse):
    model = make_sparse().float()
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    ids = IDS[:1]
    plain = model.generate(ids, **options)
    busy = score_maps(model, IDS, ["ffn"])
    off = [
        Token(name, number)
        for name, each in busy.items()
        for number in each.contributions.sum((0, 1)).topk(20).indices.tolist()
    ]
    with intervene(model, off=off):
        found = model.generate(ids, **options)
        logits = outputs(model, found)[1]
    assert torch.equal(logits[0, 11:-1].argmax(-1), found[0, 12:])
    assert not torch.equal(found, plain)


@pytest.mark.parametrize("router", ["gated", "learned", "centroid"])
def test_attribution_is_the_slope_of_the_loss(make_sparse, behavior, router):
    """Also below learned routers, whose gradient in training is an estimate."""
    model = make_sparse(router)
    estimates, step = attribute(model, behavior), 1e-5
    assert list(estimates) == list(named_layers(model))
    for token in [*strongest(estimates, 3), Token("0.ffn", 5), Token("1.o", 2), Token("0.v", 1)]:
        with intervene(model, scale={token: 1 + step}):
            more = behavior.loss(model)
        with intervene(model, scale={token: 1 - step}):
            less = behavior.loss(model)
        slope = (less - more) / (2 * step)
        found = estimates[token.layer][token.number].item()
        assert found == pytest.approx(slope, rel=1e-3, abs=1e-8)


def test_tokens_that_control_a_behavior(make_sparse, behavior):
    model = make_sparse()
    found = controlling_set(model, behavior, rise=0.2, max_tokens=40, random_sets=1)
    assert found.rise >= 0.2
    exact = ablate_each(model, behavior, found.tokens[:2])
    assert set(exact) == set(found.tokens[:2])
    added = score_maps(model, behavior.inputs)["0.ffn"].contributions.square().mean((0, 1))
    best = busiest_set(model, behavior, [Token("0.ffn", 1), Token("0.ffn", 2)])
    assert [token.number for token in best] == added.topk(2).indices.tolist()


@cases
def test_an_index(make_sparse, router, theta_norm, theta):
    model = make_sparse(router, theta_norm, theta)
    with torch.no_grad():
        for one in routers(model):
            one.bias[1] = -100.0  # tokens 8 to 15 are never active
    batches = [
        torch.randint(61, (3, 11), generator=torch.Generator().manual_seed(n)) for n in (1, 2)
    ]
    index = index_tokens(model, batches, contexts=3, threshold=0.3)
    for name in ("0.ffn", "1.o", "0.q"):
        layer = index.layers[name]
        maps = [score_maps(model, batch, [name])[name] for batch in batches]
        weights = torch.cat([each.weights.flatten(0, 1) for each in maps])
        assert torch.equal(layer.fired, (weights >= 0.3).sum(0))
        torch.testing.assert_close(layer.mean_weight, weights.mean(0))
        assert layer.norm_share.sum() == pytest.approx(1)
        assert layer.work.sum() == pytest.approx(1)
    dead = index.layers["0.ffn"].dead
    assert dead[8:16].all()
    assert not dead.all()
    assert index.layers["0.ffn"].fired[8:16].sum() == 0
    share = index.layers["0.ffn"].norm_share[8:16]
    assert (share > 0).all() if theta_norm == "all" else (share == 0).all()
    assert index.contexts(Token("0.ffn", 9)) == []
    alive = int((~dead).nonzero()[0])
    numbers = index.sample_numbers.tolist()
    around = context_weights(
        model, index, lambda found: index.samples[[numbers.index(n) for n in found]].long()
    )
    contexts = index.contexts(Token("0.ffn", alive))
    assert contexts
    best = contexts[0].weight
    assert around["0.ffn"][alive, 0].max().item() == pytest.approx(best, rel=1e-2)


def test_quantized_and_adapted_models_are_refused(make_sparse):
    model = make_sparse()
    model.peft_config = {}
    with pytest.raises(TypeError, match=r"merge it .* or look at the base .model\.unload"):
        score_maps(model, IDS)
    with pytest.raises(TypeError, match="only a TokenFormer's tokens can be interpreted"):
        named_layers(torch.nn.Linear(2, 2))
    other = make_sparse()
    other.config.quantization_config = tokenformer.TokenQuantization()
    with pytest.raises(ValueError, match="the model is quantized"):
        index_tokens(other, [IDS])
