"""Score maps are what the layers compute, and direct effects sum up to the logits."""

import pytest
import torch

from tests.support.image_text import make_joint
from tokenformer.interpret.intervention import intervene
from tokenformer.interpret.score_map import direct_effects, score_maps
from tokenformer.interpret.token_name import Token, TokenNameError, check_tokens, named_layers

IDS = torch.arange(20).view(2, 10)


@pytest.mark.parametrize("theta", ["l2_gelu", "gelu_l2", "l1_gelu", "softmax"])
def test_weights_times_values_are_the_output_of_every_layer(make_model, theta):
    model = make_model("tokenformer", theta=theta)
    outputs = {}
    for name, layer in named_layers(model).items():
        layer.register_forward_hook(lambda _, x, y, name=name: outputs.update({name: y}))
    maps = score_maps(model, IDS)
    assert list(maps) == [f"{n}.{p}" for n in (0, 1) for p in ("q", "k", "v", "o", "ffn")]
    for name, each in maps.items():
        torch.testing.assert_close(each.output, outputs[name])
        assert each.weights.shape == (2, 10, named_layers(model)[name].num_tokens)


def test_contributions_and_the_share_of_the_top_tokens(make_model):
    model = make_model("tokenformer")
    each = score_maps(model, IDS, ["1.ffn"])["1.ffn"]
    w, v = each.weights[1, 3], each.values
    lengths = torch.stack([(w[i] * v[i]).norm() for i in range(len(v))])
    torch.testing.assert_close(each.contributions[1, 3], lengths)
    best = lengths.argsort(descending=True)[:5]
    assert each.top(5)[1][1, 3].tolist() == best.tolist()
    torch.testing.assert_close(each.share(5)[1, 3], lengths[best].sum() / lengths.sum())
    whole, part = w @ v, w[best] @ v[best]
    expected = 1 - (whole - part).square().sum() / whole.square().sum()
    torch.testing.assert_close(each.explained(5)[1, 3], expected)
    torch.testing.assert_close(each.explained(999), torch.ones(2, 10).double())


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("residual", ["sequential", "parallel"])
def test_direct_effects_sum_up_to_the_logit(make_model, norm, tied, residual):
    model = make_model("tokenformer", norm=norm, tie_word_embeddings=tied, residual=residual)
    targets = (IDS * 7) % 61
    maps = score_maps(model, IDS)
    effects = direct_effects(model, maps, targets)
    assert list(effects) == ["0.o", "0.ffn", "1.o", "1.ffn"]
    with torch.no_grad():
        logits = model(input_ids=IDS).logits.gather(-1, targets[..., None])[..., 0]
        # What no token writes: the embedding, through the same norm, and the norm's bias.
        x, norm_module, head = maps.final, model.model.norm, model.lm_head.weight[targets]
        embedded = model.model.embed_tokens(IDS)
        if norm == "layer_norm":
            embedded = embedded - embedded.mean(-1, keepdim=True)
            scale = (x.var(-1, unbiased=False) + norm_module.eps).rsqrt()
        else:
            scale = (x.square().mean(-1) + norm_module.eps).rsqrt()
        normed = embedded * scale[..., None] * norm_module.weight + norm_module.bias
        others = (normed * head).sum(-1)
    total = sum(effect.sum(-1) for effect in effects.values())
    torch.testing.assert_close(total + others, logits)


@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_direct_effects_of_an_image_on_its_class(make_classifier, pooling):
    model = make_classifier(pooling=pooling)
    images = torch.randn(3, 1, 12, 12).double()
    classes = torch.tensor([0, 4, 2])
    maps = score_maps(model, images)
    assert maps.grid == (3, 3)
    effects = direct_effects(model, maps, classes)
    base = model.model
    with torch.no_grad():
        logits = model(pixel_values=images).logits
        embedded, x = base.embed_patches(images), maps.final
        embedded = embedded - embedded.mean(-1, keepdim=True)
        scale = (x.var(-1, unbiased=False, keepdim=True) + base.norm.eps).rsqrt()
        bias = 0 if base.norm.bias is None else base.norm.bias
        others = model.forward_head(embedded * scale * base.norm.weight + bias)
    total = sum(effect.sum((1, 2)) for effect in effects.values())
    rows = torch.arange(3)
    torch.testing.assert_close(total + others[rows, classes], logits[rows, classes])


def test_a_pinned_token_has_the_pinned_weight(make_model):
    """So the effects still sum up to the logit; also within another block, and after it."""
    model = make_model("tokenformer")
    targets = (IDS * 7) % 61
    free = score_maps(model, IDS)
    values = free["1.ffn"].values.clone()
    pin = {"1.ffn.3": 2.0, "1.ffn.5": -1.0, "0.q.1": 0.5}
    with intervene(model, pin=pin), intervene(model, off=["1.ffn.4"], pin={"1.ffn.5": 9.0}):
        maps = score_maps(model, IDS)
        effects = direct_effects(model, maps, targets)
        with torch.no_grad():
            logits = model(input_ids=IDS).logits.gather(-1, targets[..., None])[..., 0]
    each = maps["1.ffn"]
    assert (each.weights[..., 3] == 2).all()
    assert (each.weights[..., 5] == -1).all(), "the outer block has pinned it"
    torch.testing.assert_close(each.contributions[0, 0, 3], 2 * values[3].norm())
    assert (each.contributions[..., 4] == 0).all()
    assert (maps["0.q"].weights[..., 1] == 0.5).all()
    total = sum(effect.sum(-1) for effect in effects.values())
    torch.testing.assert_close(total + what_no_token_writes(model, maps, targets), logits)
    after = score_maps(model, IDS)["1.ffn"]
    assert torch.equal(after.weights, free["1.ffn"].weights)
    assert torch.equal(after.values, values)


def what_no_token_writes(model, maps, targets):
    """The part of the logits that comes from the embedding and the norm's bias."""
    embedded = model.model.embed_tokens(maps.inputs)
    embedded = embedded - embedded.mean(-1, keepdim=True)
    norm, scale = model.model.norm, maps.final.var(-1, unbiased=False, keepdim=True)
    normed = embedded * (scale + norm.eps).rsqrt() * norm.weight + norm.bias
    return (normed * model.lm_head.weight[targets]).sum(-1).detach()


def test_vision_language_models_are_refused_with_what_to_do():
    joint = make_joint()
    for inputs in (IDS, torch.randn(1, 3, 8, 8), {"input_ids": IDS}):
        with pytest.raises(TypeError, match="use the vision or the language model that it was"):
            score_maps(joint, inputs)


def test_layers_and_tokens_by_name(make_model):
    model = make_model("tokenformer")
    assert list(named_layers(model, ["ffn"])) == ["0.ffn", "1.ffn"]
    assert list(named_layers(model, "1")) == [f"1.{p}" for p in ("q", "k", "v", "o", "ffn")]
    assert str(Token.parse("1.ffn.43")) == "1.ffn.43"
    layers = named_layers(model)
    assert check_tokens(layers, ["0.q.3", Token("0.q", 3)]) == [("0.q", 3)]
    for wrong, message in {
        "1.ffn.44": "1.ffn has 44 tokens",
        "9.ffn.0": "no layer '9.ffn'",
        "ffn": "'ffn' is not a token",
    }.items():
        with pytest.raises(TokenNameError, match=message):
            check_tokens(layers, [wrong])
    with pytest.raises(TokenNameError, match="no layer 'up'"):
        named_layers(model, ["up"])
    with pytest.raises(TypeError, match="only a TokenFormer"):
        named_layers(make_model("transformer"))


def test_the_model_is_left_as_it_was(make_model):
    model = make_model("tokenformer").train()
    score_maps(model, IDS)
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())
    with pytest.raises(ValueError, match="one id per position"):
        direct_effects(model, score_maps(model, IDS), torch.zeros(2, 3).long())
