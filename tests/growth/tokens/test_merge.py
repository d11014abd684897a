"""Merging: exact for two equal models, the mean of two different ones."""

import copy

import pytest
import torch

import tokenformer
from tests.support.growth import (
    logits,
    relative_change,
    train_on_text,
    train_once,
    trained_tokenformer,
)
from tokenformer.growth.parameter_mapping import NEW
from tokenformer.growth.tokens.layer_merge import merge_layer
from tokenformer.growth.tokens.token_set import TokenSet
from tokenformer.ops import THETAS, pattention

LARGER = {"qkv_tokens": 40, "output_tokens": 30, "ffn_tokens": [120, 96]}


@pytest.mark.parametrize("own", ["average", "sum"])
@pytest.mark.parametrize("theta", THETAS)
def test_a_model_joined_with_itself_is_itself(make_config, theta, own):
    model, _ = trained_tokenformer(make_config, theta=theta)
    again, report = tokenformer.merge(model, copy.deepcopy(model), own=own)
    assert again.config.to_dict() == model.config.to_dict()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))
    assert report.max_output_change == 0


@pytest.mark.parametrize("own", ["average", "sum"])
@pytest.mark.parametrize("theta", ["l2_gelu", "gelu_l2", "l1_gelu"])
def test_zero_keys_join_exactly_whoever_has_them(make_config, theta, own):
    model, _ = trained_tokenformer(make_config, torch.float64, theta=theta)
    one, _ = tokenformer.grow(model, **LARGER, seed=1)
    two, _ = tokenformer.grow(model, ffn_tokens=100, seed=2)
    for a, b in ((model, one), (one, model), (one, two)):
        both, _ = tokenformer.merge(a, b, own=own)
        assert relative_change(logits(model), logits(both)) < 1e-12
        assert both.config.scale("ffn", 0) == 96
    assert both.config.ffn_tokens == [96 + 24 + 4, 96 + 4]


def test_rows_keep_their_places_and_the_common_ones_come_once(make_config):
    model, _ = trained_tokenformer(make_config)
    one, _ = tokenformer.grow(model, ffn_tokens=100, init="random", scale="frozen", seed=1)
    two, _ = tokenformer.grow(model, ffn_tokens=110, init="random", scale="frozen", seed=2)
    both, report = tokenformer.merge(one, two, own="sum")
    keys = both.model.layers[0].ffn.key_tokens
    assert torch.equal(keys[:100], one.model.layers[0].ffn.key_tokens)
    assert torch.equal(keys[100:], two.model.layers[0].ffn.key_tokens[96:])
    values = both.model.layers[0].ffn.value_tokens
    assert torch.equal(values[100:], two.model.layers[0].ffn.value_tokens[96:])
    half, _ = tokenformer.merge(one, two)
    values = half.model.layers[0].ffn.value_tokens
    assert torch.equal(values[:96], model.model.layers[0].ffn.value_tokens)
    assert torch.equal(values[96:100], one.model.layers[0].ffn.value_tokens[96:] / 2)
    assert torch.equal(values[100:], two.model.layers[0].ffn.value_tokens[96:] / 2)
    assert report.mappings["model.layers.0.ffn.key_tokens"].rows.tolist() == [
        *range(100),
        *[NEW] * 14,
    ]
    assert report.parameters_after == both.num_parameters()


def test_equal_rows_are_matched_one_to_one():
    keys, values = torch.eye(4)[[0, 1, 1, 2]], torch.ones(4, 3)
    a, b = TokenSet(keys, values, 4.0), TokenSet(keys[[1, 0, 0, 3]], values, 4.0)
    both = merge_layer(a, b, "l2_gelu", 1.0)
    assert torch.equal(both.tokens.keys, torch.cat([keys, keys[:1]]))
    assert both.rows.tolist() == [0, 1, 2, 3, NEW]


@pytest.mark.parametrize("theta", ["l2_gelu", "l1_gelu"])
def test_a_layer_becomes_the_mean_or_the_sum_of_two(theta):
    """On inputs that point everywhere alike the joined scale gives every token its old weight."""
    generator = torch.Generator().manual_seed(0)

    def normal_tensor(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shared = normal_tensor(2000, 64), normal_tensor(2000, 8)
    a, b = (
        TokenSet(
            torch.cat([shared[0], size * normal_tensor(extra, 64)]),
            torch.cat([shared[1], normal_tensor(extra, 8)]),
            scale,
        )
        # What the shared tokens weigh is the same in both: mass per scale is alike.
        for size, extra, scale in ((1.0, 1000, 3000.0), (2.0, 1000, 2000.0 + 1000 * {
            "l2_gelu": 4, "l1_gelu": 2}[theta]))
    )  # fmt: skip
    x = normal_tensor(100, 64)

    def output(tokens):
        return pattention(x, tokens.keys, tokens.values, scale_tokens=tokens.scale, theta=theta)

    mean = merge_layer(a, b, theta, 0.5).tokens
    expected = (output(a) + output(b)) / 2
    assert (output(mean) - expected).norm() < 0.05 * expected.norm()
    common = TokenSet(*shared, 2000.0)
    expected = output(a) + output(b) - output(common)
    total = merge_layer(a, b, theta, 1.0).tokens
    assert (output(total) - expected).norm() < 0.05 * expected.norm()
    apart = merge_layer(
        a, TokenSet(normal_tensor(50, 64), normal_tensor(50, 8), 50.0), theta, 0.5
    ).tokens
    assert apart.scale == pytest.approx(a.scale + 50)


@pytest.mark.slow
def test_fine_tunes_of_one_model_join_to_something_between_them(text_model, text):
    base = text_model()
    grown, _ = tokenformer.grow(base, qkv_tokens=60, output_tokens=60, ffn_tokens=160)
    halves = text[:20_000], 255 - text[:20_000].clamp(max=255)  # a text, and one in other bytes
    tuned = [copy.deepcopy(grown) for _ in halves]
    for model, half in zip(tuned, halves, strict=True):
        train_on_text(model, half, 60, rate=1e-3)
    both, _ = tokenformer.merge(*tuned)

    @torch.no_grad()
    def loss(model, half):
        ids = half[:4096].view(-1, 64)
        return model(input_ids=ids, labels=ids).loss.item()

    for mine, other, half in ((0, 1, halves[0]), (1, 0, halves[1])):
        assert loss(tuned[mine], half) < loss(both, half) < loss(tuned[other], half)


@pytest.mark.parametrize("embeddings", ["a", "b", "average"])
def test_embeddings_norms_and_positions_are_whose_they_are_asked_to_be(make_config, embeddings):
    options = {"positions": "learned", "norm_parameters": "weight"}
    a, optimizer = trained_tokenformer(make_config, **options)
    b = copy.deepcopy(a)
    other = torch.optim.AdamW(b.parameters(), lr=1e-2)
    train_once(b, other)
    both, report = tokenformer.merge(a, b, embeddings=embeddings)
    plain = [name for name, _ in a.named_parameters() if not name.endswith("_tokens")]
    assert len(plain) == 2 + 4 + 2
    for name in plain:
        one, two = a.get_parameter(name), b.get_parameter(name)
        expected = {"a": one, "b": two, "average": (one + two) / 2}[embeddings]
        assert torch.equal(both.get_parameter(name), expected), name
    joint = tokenformer.grow_optimizer(optimizer, report)
    moment = joint.state[both.model.embed_tokens.weight]["exp_avg"]
    assert moment.any() == (embeddings != "b")
    train_once(both, joint)


def test_the_optimizer_of_a_knows_the_rows_of_a(make_config):
    a, optimizer = trained_tokenformer(make_config)
    b = copy.deepcopy(a)
    with torch.no_grad():
        b.model.layers[0].ffn.key_tokens[:10].add_(1.0)
    both, report = tokenformer.merge(a, b)
    joint = tokenformer.grow_optimizer(optimizer, report)
    name = "model.layers.0.ffn.key_tokens"
    before = optimizer.state[a.get_parameter(name)]["exp_avg"]
    after = joint.state[both.get_parameter(name)]["exp_avg"]
    assert torch.equal(after[10:96], before[10:])
    assert torch.allclose(after[:10], before[:10] / 2), "half the value, half the gradient"
    assert after.shape[0] == 106
    assert not after[96:].any()


@pytest.mark.parametrize("learned", [(True, True), (True, False), (False, True)])
def test_learned_scales_join_too(make_config, tmp_path, learned):
    base, _ = trained_tokenformer(make_config, torch.float64)
    a, b = (
        tokenformer.grow(base, ffn_tokens=100, scale="learned" if each else None, seed=seed)[0]
        for seed, each in enumerate(learned)
    )
    both, report = tokenformer.merge(a, b)
    assert both.config.learned_scale
    assert both.model.layers[0].ffn.scale_tokens.item() == 96
    assert relative_change(logits(base), logits(both)) < 1e-12
    both.save_pretrained(tmp_path)
    again = tokenformer.TokenformerForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(logits(again.eval()), logits(both))
    assert report.parameters_after == both.num_parameters()


def test_both_models_are_left_alone(make_config):
    a, _ = trained_tokenformer(make_config)
    b, _ = tokenformer.grow(a, ffn_tokens=100, init="random")
    before = [{n: p.detach().clone() for n, p in m.named_parameters()} for m in (a, b)]
    for embeddings in ("a", "b"):
        both, _ = tokenformer.merge(a, b, embeddings=embeddings)
        with torch.no_grad():
            for parameter in both.parameters():
                parameter.add_(1.0)
    for model, kept in zip((a, b), before, strict=True):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, kept[name])


def test_half_precision_rows_are_compared_by_their_bits(make_config):
    model = trained_tokenformer(make_config)[0].bfloat16()
    both, _ = tokenformer.merge(model, copy.deepcopy(model))
    assert both.config.ffn_tokens == 96
    assert both.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 62}, "vocab_size 61 and 62"),
        ({"hidden_size": 64, "num_attention_heads": 8},
         "hidden_size 32 and 64, num_attention_heads 4 and 8, num_key_value_heads 4 and 8"),
        ({"num_hidden_layers": 3}, "num_hidden_layers 2 and 3"),
        ({"theta": "gelu_l2"}, "theta l2_gelu and gelu_l2"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings True and False"),
        ({"dtype": torch.float64}, "dtype torch.float32 and torch.float64"),
    ],
    ids=str,
)  # fmt: skip
def test_models_of_another_shape_are_refused_with_all_differences(make_config, options, message):
    a, _ = trained_tokenformer(make_config)
    b, _ = trained_tokenformer(make_config, **options)
    with pytest.raises(ValueError, match=f"cannot be merged: {message}$"):
        tokenformer.merge(a, b)


def test_wrong_options_and_models_are_named(make_config):
    model, _ = trained_tokenformer(make_config)
    with pytest.raises(ValueError, match="embeddings='c' is unknown; choose one of a, b, average"):
        tokenformer.merge(model, model, embeddings="c")
    with pytest.raises(ValueError, match="own='max' is unknown; choose one of average, sum"):
        tokenformer.merge(model, model, own="max")
    with pytest.raises(TypeError, match="not a TransformerForCausalLM's"):
        tokenformer.merge(model, tokenformer.TransformerForCausalLM(make_config("transformer")))
