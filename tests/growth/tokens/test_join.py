"""Joining a vision and a language model: what is exact, what is reported, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tokenformer
from tests.support.image_text import IMAGE_ID, POSITIONS, SIDE, make_halves, text_ids
from tokenformer.growth.tokens.join import set_part_rates
from tokenformer.growth.tokens.token_set import token_layers
from tokenformer.ops import pattention

TEXT = text_ids("A dog runs through the grass.")


def test_routed_keeps_both_models_exactly():
    vision, language = (model.double() for model in make_halves())
    joint, report = tokenformer.join_modalities(vision, language, new_tokens=7)
    images = torch.randn(3, 3, SIDE, SIDE, dtype=torch.float64)
    wanted = vision.forward_features(images)
    features = joint.get_image_features(images).last_hidden_state
    assert (features - wanted).abs().max() <= 1e-12 * wanted.abs().max()
    logits = language(TEXT).logits
    found = joint(TEXT).logits
    assert (found - logits).abs().max() <= 1e-12 * logits.abs().max()
    assert report.vision_change < 1e-12
    assert report.language_change < 1e-12


def test_features_do_not_depend_on_where_the_image_is():
    vision, language = (model.double() for model in make_halves())
    joint, _ = tokenformer.join_modalities(vision, language, new_tokens=7)
    images = torch.randn(2, 3, SIDE, SIDE, dtype=torch.float64)
    wanted = vision.forward_features(images)
    run = [IMAGE_ID] * POSITIONS
    ids = torch.tensor([[*b"before ", *run, *run, *b" after"]])  # two images, side by side
    hidden = joint.model(ids, pixel_values=images).last_hidden_state
    found = hidden[0, 7 : 7 + 2 * POSITIONS].unflatten(0, (2, POSITIONS))
    torch.testing.assert_close(found, wanted, atol=1e-11, rtol=1e-11)


def test_text_after_an_image_depends_on_it():
    vision, language = (model.double() for model in make_halves())
    for mode in ("routed", "shared", "projector"):
        joint, _ = tokenformer.join_modalities(vision, language, new_tokens=7, mode=mode)
        ids = torch.tensor([[*b"ab", *[IMAGE_ID] * POSITIONS, *b"cd"]])
        one, other = torch.randn(2, 1, 3, SIDE, SIDE, dtype=torch.float64)
        first, second = (joint(ids, pixel_values=each).logits for each in (one, other))
        assert torch.equal(first[:, :2], second[:, :2])  # before the image
        assert (first[:, -2:] - second[:, -2:]).abs().max() > 1e-3


def test_shared_layers_are_the_sum_of_both_at_the_scale_of_merge():
    vision, language = (model.double() for model in make_halves())
    joint, report = tokenformer.join_modalities(vision, language, new_tokens=7, mode="shared")
    assert report.vision_change > 1e-3
    assert report.language_change > 1e-3
    of_vision, of_language = token_layers(vision), token_layers(language)
    for name, (_, layer) in token_layers(joint).items():
        a, b = of_vision[name][1], of_language[name][1]
        assert layer.scale_tokens == a.scale_tokens + b.scale_tokens
        keys = torch.cat([a.key_tokens, b.key_tokens])
        values = torch.cat([a.value_tokens, b.value_tokens])
        x = torch.randn(4, keys.shape[1], dtype=torch.float64)
        wanted = pattention(x, keys, values, scale_tokens=a.scale_tokens + b.scale_tokens)
        torch.testing.assert_close(layer(x), wanted)


def test_merge_gives_the_same_scale():
    from tokenformer.growth.tokens.layer_merge import merge_layer
    from tokenformer.growth.tokens.token_set import TokenSet

    vision, language = make_halves()
    joint, _ = tokenformer.join_modalities(vision, language, mode="shared")
    of_vision, of_language = token_layers(vision), token_layers(language)
    for name, (_, layer) in token_layers(joint).items():
        sets = [TokenSet.of(layers[name][1]) for layers in (of_vision, of_language)]
        merged = merge_layer(*sets, "l2_gelu", 1.0)
        assert merged.tokens.scale == pytest.approx(layer.scale_tokens)


def test_a_projector_takes_models_of_any_shape_and_freezes_the_encoder():
    vision, _ = make_halves(hidden_size=16, num_hidden_layers=3)
    _, language = make_halves()
    joint, report = tokenformer.join_modalities(
        vision, language, mode="projector", projector_size=24
    )
    assert report.vision_change < 1e-6
    assert report.language_change < 1e-6
    encoder = joint.model.images.encoder
    assert not any(parameter.requires_grad for parameter in encoder.parameters())
    joint.train()
    assert not encoder.training
    images = torch.randn(2, 3, SIDE, SIDE)
    features = encoder(images).last_hidden_state
    torch.testing.assert_close(features, vision.forward_features(images), atol=1e-5, rtol=1e-5)
    assert joint.get_image_features(images).pooler_output.shape == (2, POSITIONS, 32)


def test_new_tokens_get_gradients_from_the_first_step():
    joint, _ = tokenformer.join_modalities(*make_halves(), new_tokens=7)
    ids = torch.tensor([[*[IMAGE_ID] * POSITIONS, *b"abc"]])
    joint(ids, pixel_values=torch.randn(1, 3, SIDE, SIDE), labels=ids).loss.backward()
    for name, (_, layer) in token_layers(joint).items():
        start, gradient = layer.vision_tokens, layer.key_tokens.grad
        assert not layer.key_tokens[start : start + 7].any()
        assert gradient[start : start + 7].abs().max() > 0, name


def test_grown_models_with_frozen_tokens_can_be_joined():
    """Their rates and ages are of their own tokens; those of the joint model start anew."""
    vision, language = make_halves()
    halves = [
        tokenformer.grow(model.double(), ffn_tokens=80, old_rate=0)[0]
        for model in (vision, language)
    ]
    joint, report = tokenformer.join_modalities(*halves, new_tokens=3)
    assert report.vision_change < 1e-12
    assert report.language_change < 1e-12
    assert joint.config.row_rates("ffn", 0) is None
    grown, _ = tokenformer.grow(joint, new_tokens=5)
    assert grown.config.ages("ffn", 0) == [0] * 83 + [1] * 2 + [0] * 80


def test_rates_freeze_the_tokens_of_each_half():
    joint, _ = tokenformer.join_modalities(
        *make_halves(), new_tokens=7, vision_rate=0, language_rate=0.1
    )
    rates = joint.config.row_rates("q", 0)
    assert rates == [0.0] * 20 + [1.0] * 7 + [0.1] * 24
    set_part_rates(joint.config)
    assert joint.config.token_rates is None
    with pytest.raises(ValueError, match="must not be negative"):
        set_part_rates(joint.config, vision=-1.0)


@pytest.mark.parametrize("option", [{"hidden_size": 64}, {"num_hidden_layers": 3}])
def test_models_of_different_shape_are_refused(option: dict[str, int]) -> None:
    vision, _ = make_halves(**option)
    _, language = make_halves()
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=rf"{name} \({value} and \d+\).*mode='projector'"):
        tokenformer.join_modalities(vision, language)


def test_the_wrong_kinds_of_models_are_refused():
    vision, language = make_halves()
    with pytest.raises(TypeError, match="vision is a TokenformerForCausalLM"):
        tokenformer.join_modalities(language, vision)
    with pytest.raises(ValueError, match="dtype"):
        tokenformer.join_modalities(vision.double(), language)
    with pytest.raises(ValueError, match="mode='both'"):
        tokenformer.join_modalities(vision.float(), language, mode="both")
    with pytest.raises(ValueError, match="theta softmax"):
        tokenformer.join_modalities(*make_halves(theta="softmax"))


def test_the_models_are_not_changed_and_the_report_is_saved(tmp_path: Path) -> None:
    vision, language = make_halves()
    before = {name: tensor.clone() for name, tensor in language.state_dict().items()}
    joint, report = tokenformer.join_modalities(vision, language, new_tokens=2)
    with torch.no_grad():
        for parameter in joint.parameters():
            parameter.add_(1)
    assert all(torch.equal(before[n], tensor) for n, tensor in language.state_dict().items())
    report.save(tmp_path / "report.json")
    saved = json.loads((tmp_path / "report.json").read_text())
    assert saved["mode"] == "routed"
    assert saved["parameters_joint"] == joint.num_parameters()
    assert "routed, 2 new tokens a layer" in str(report)


def make_joint(mode: str = "routed") -> Any:
    pair = (model.double() for model in make_halves())
    return tokenformer.join_modalities(*pair, new_tokens=7, mode=mode, vision_rate=0)[0]


@pytest.mark.parametrize("mode", ["routed", "shared"])
def test_growth_adds_new_tokens_and_changes_nothing(mode: str, tmp_path: Path) -> None:
    joint = make_joint(mode)
    with torch.no_grad():
        for _, layer in token_layers(joint).values():
            layer.key_tokens[20:25].normal_()  # some are new tokens, after training
    grown, report = tokenformer.grow(joint, new_tokens=12)
    assert report.exact
    assert report.max_output_change < 1e-12
    ids = torch.tensor([[*b"ab", *[IMAGE_ID] * POSITIONS, *b"cd"]])
    images = torch.randn(1, 3, SIDE, SIDE, dtype=torch.float64)
    before, after = (model(ids, pixel_values=images).logits for model in (joint, grown))
    assert (before - after).abs().max() <= 1e-12 * before.abs().max()
    assert grown.config.new_tokens == 12
    for name, (_, layer) in token_layers(grown).items():
        old = token_layers(joint)[name][1]
        assert layer.num_tokens == old.num_tokens + 5
        start = joint.config.parts(*token_layers(joint)[name][0])[0] + 7
        assert not layer.key_tokens[start : start + 5].any()
        assert layer.value_tokens[start : start + 5].std() > 0
        assert torch.equal(layer.value_tokens[start + 5 :], old.value_tokens[start:])
    assert grown.config.row_rates("q", 0) == [0.0] * 20 + [1.0] * (12 + 24)
    grown.float().save_pretrained(tmp_path)
    again = tokenformer.TokenformerForImageTextToText.from_pretrained(tmp_path)
    assert again.config.new_tokens == 12


def test_the_optimizer_grows_with_a_joint_model():
    joint = make_joint()
    optimizer = torch.optim.AdamW(joint.parameters())
    joint(TEXT, labels=TEXT).loss.backward()
    optimizer.step()
    grown, report = tokenformer.grow(joint, new_tokens=9, old_rate=0)
    larger = tokenformer.grow_optimizer(optimizer, report)
    old, new = (model.model.layers[0].ffn.key_tokens for model in (joint, grown))
    moments = larger.state[new]["exp_avg"]
    assert torch.equal(moments[: 41 + 7], optimizer.state[old]["exp_avg"][: 41 + 7])
    assert not moments[41 + 7 : 41 + 9].any()
    assert torch.equal(moments[41 + 9 :], optimizer.state[old]["exp_avg"][41 + 7 :])
    assert set(grown.config.row_rates("ffn", 0)[: 41 + 7]) == {0.0}


def test_other_growth_of_a_joint_model_is_refused_by_name():
    joint = make_joint()
    refused = {
        "by new_tokens only, not by ffn_tokens": {"ffn_tokens": 500},
        "by new_tokens only, not by to": {"to": "354m"},
        "such as new_tokens=128": {},
        "growth cannot remove tokens": {"new_tokens": 3},
        "zero keys at a frozen scale": {"new_tokens": 9, "init": "random"},
    }
    for message, options in refused.items():
        with pytest.raises(ValueError, match=message):
            tokenformer.grow(joint, **options)
    with pytest.raises(ValueError, match="mode='projector'"):
        tokenformer.grow(make_joint("projector"), new_tokens=9)


def test_merging_and_cutting_a_joint_model_are_refused_by_name():
    joint = make_joint("shared")
    for change in (
        lambda: tokenformer.merge(joint, joint),
        lambda: tokenformer.take_prefix(joint, 0.5),
        lambda: tokenformer.set_active_share(joint, 0.5),
    ):
        with pytest.raises(ValueError, match="join them again"):
            change()
