"""Token growth: exact where promised, trainable in every new row, reproducible by seed."""

import json

import pytest
import torch

import tokenformer
from tests.support.growth import logits, relative_change, train_once, trained_tokenformer
from tokenformer.growth.tokens.token_growth import INITIALIZERS

# The paper's growth steps in proportion, at a width that tests can afford.
STEPS = [(24, 89), (89, 202), (202, 359)]
EXACT = {torch.float32: 1e-5, torch.float64: 1e-12}


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("init", ["zero", "clone"])
@pytest.mark.parametrize("theta", ["l2_gelu", "gelu_l2", "l1_gelu"])
def test_every_step_is_exact_also_after_saving(make_config, tmp_path, init, theta, dtype):
    model, _ = trained_tokenformer(make_config, dtype, theta=theta)
    first = logits(model)
    for place, (_, tokens) in enumerate(STEPS):
        sizes = {"qkv_tokens": tokens, "output_tokens": tokens, "ffn_tokens": 4 * tokens}
        grown, report = tokenformer.grow(model, **sizes, init=init, seed=place)
        assert relative_change(first, logits(grown)) < EXACT[dtype]
        assert report.max_output_change < EXACT[dtype]
        assert report.max_layer_change < EXACT[dtype]
        grown.save_pretrained(tmp_path / str(place))
        model = tokenformer.TokenformerForCausalLM.from_pretrained(
            tmp_path / str(place), dtype=dtype
        )
        model.eval()
        assert relative_change(first, logits(model)) < EXACT[dtype]
        assert model.config.qkv_tokens == tokens
        assert report.parameters_after == model.num_parameters()


@pytest.mark.parametrize("theta", ["l2_gelu", "softmax"])
def test_whole_clones_are_exact_for_every_theta(make_config, theta):
    model, _ = trained_tokenformer(make_config, torch.float64, theta=theta)
    grown, report = tokenformer.grow(
        model, qkv_tokens=48, output_tokens=72, ffn_tokens=96, init="clone"
    )
    assert relative_change(logits(model), logits(grown)) < 1e-12
    assert grown.config.scale("o", 0) == 72
    assert grown.config.scale_tokens is None  # twice the tokens, twice the scale
    assert report.scale == "frozen"


def test_mixed_inits_and_layers_of_their_own_size(make_config, tmp_path):
    model, _ = trained_tokenformer(make_config, torch.float64)
    first = logits(model)
    once, _ = tokenformer.grow(model, qkv_tokens=[30, 24], k_tokens=50, init="clone")
    assert once.config.tokens("q", 0) == 30
    assert once.config.tokens("q", 1) == 24
    assert once.config.tokens("k", 1) == 50
    twice, _ = tokenformer.grow(once, ffn_tokens=200, init="zero")
    assert twice.config.scale("ffn", 0) == 96
    thrice, report = tokenformer.grow(twice, ffn_tokens=400, init="clone")
    assert thrice.config.scale("ffn", 0) == 192, "twice the scale it had, whatever its token count"
    assert relative_change(first, logits(thrice)) < 1e-12
    assert {part.name for part in report.parts} >= {
        "model.layers.0.attention.k",
        "model.layers.1.ffn",
    }


def test_random_has_the_new_count_for_scale_and_jumps(make_config):
    model, _ = trained_tokenformer(make_config)
    grown, report = tokenformer.grow(model, qkv_tokens=96, init="random")
    assert grown.config.scale_tokens is None
    assert report.max_output_change > 1e-3
    assert report.max_output_change == pytest.approx(moved_on_probe(model, grown), rel=0.9)


def test_shrink_scales_old_values_down_where_it_adds_random_tokens(make_config):
    model, _ = trained_tokenformer(make_config)
    rows = model.model.layers[0].attention.q.key_tokens.shape[0]
    grown, report = tokenformer.grow(model, qkv_tokens=4 * rows, init="shrink")
    random, _ = tokenformer.grow(model, qkv_tokens=4 * rows, init="random")
    before, after, like = (each.model.layers[0].attention.q for each in (model, grown, random))
    assert torch.equal(after.key_tokens, like.key_tokens)
    assert torch.equal(after.value_tokens[rows:], like.value_tokens[rows:])
    assert torch.equal(after.value_tokens[:rows], before.value_tokens / 2)
    same = "model.layers.0.ffn.value_tokens"
    assert torch.equal(grown.get_parameter(same), model.get_parameter(same)), "it did not grow"
    assert grown.config.scale_tokens is None
    assert report.max_output_change > 1e-3


def moved_on_probe(model, grown):
    torch.manual_seed(1)
    tokens = torch.randint(61, (8, 40))
    return relative_change(logits(model, tokens), logits(grown, tokens))


@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_zero_values_are_exact_where_new_keys_can_span_the_old(make_config, dtype):
    model, _ = trained_tokenformer(make_config, dtype)
    grown, report = tokenformer.grow(
        model, qkv_tokens=60, output_tokens=56, ffn_tokens=384, init="zero_value"
    )
    assert grown.config.scale("ffn", 1) == 96 * 384 / 96
    assert grown.config.scale("o", 0) == 56
    assert relative_change(logits(model), logits(grown)) < EXACT[dtype]
    assert report.max_layer_change < EXACT[dtype]
    keys = grown.model.layers[0].ffn.key_tokens.detach()
    alike = torch.nn.functional.cosine_similarity(keys[96:, None], keys[None, :96], dim=-1)
    assert alike.abs().max() < 0.9, "new directions, not copies"


@pytest.mark.parametrize(("theta", "tokens"), [("l2_gelu", 110), ("gelu_l2", 384)])
def test_zero_values_are_nearly_exact_elsewhere(make_config, theta, tokens):
    """14 keys cannot span 32 dimensions; the norm of gelu(A) is no function of a Gram matrix."""
    model, _ = trained_tokenformer(make_config, theta=theta)
    nearly = tokenformer.grow(model, ffn_tokens=tokens, init="zero_value")
    jumping = tokenformer.grow(model, ffn_tokens=tokens, init="random")
    assert 1e-5 < nearly[1].max_output_change < jumping[1].max_output_change


@pytest.mark.parametrize("init", INITIALIZERS)
def test_every_new_row_moves_in_every_layer_after_one_step(make_config, init):
    model, _ = trained_tokenformer(make_config)
    grown, _ = tokenformer.grow(model, qkv_tokens=60, output_tokens=50, ffn_tokens=200, init=init)
    before = {name: p.detach().clone() for name, p in grown.named_parameters()}
    optimizer = torch.optim.AdamW(grown.parameters(), lr=1e-2, weight_decay=0.0)
    train_once(grown, optimizer)
    for name, parameter in grown.named_parameters():
        if name.endswith("key_tokens"):
            values = name.replace("key", "value")
            keys_moved = (parameter != before[name]).any(1)
            values_moved = (grown.get_parameter(values) != before[values]).any(1)
            assert (keys_moved | values_moved).all(), name


def test_copies_part_ways_when_trained(make_config):
    model, _ = trained_tokenformer(make_config)
    grown, _ = tokenformer.grow(model, ffn_tokens=192, init="clone")
    optimizer = torch.optim.SGD(grown.parameters(), lr=1.0)
    train_once(grown, optimizer)
    keys = grown.model.layers[0].ffn.key_tokens
    assert (keys[:96] != keys[96:]).any(1).all()


def test_the_model_that_grows_is_left_alone(make_config):
    model, _ = trained_tokenformer(make_config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    grown, _ = tokenformer.grow(model, ffn_tokens=200)
    with torch.no_grad():
        for parameter in grown.parameters():
            parameter.add_(1.0)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
    assert model.config.ffn_tokens == 96


def test_the_same_seed_draws_the_same(make_config):
    model, _ = trained_tokenformer(make_config)
    torch.manual_seed(5)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    one, two, other = (
        tokenformer.grow(model, ffn_tokens=200, seed=seed)[0].model.layers[1].ffn.value_tokens
        for seed in (3, 3, 4)
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(torch.rand(3), drawn), "nobody else's generator is touched"


def test_a_learned_scale_is_a_parameter_that_is_saved_and_grows_on(make_config, tmp_path):
    model, _ = trained_tokenformer(make_config, torch.float64)
    grown, report = tokenformer.grow(model, qkv_tokens=48, init="clone", scale="learned")
    assert relative_change(logits(model), logits(grown)) < 1e-12
    assert report.parameters_after == grown.num_parameters()
    optimizer = torch.optim.AdamW(grown.parameters(), lr=1e-1, weight_decay=0.0)
    train_once(grown, optimizer)
    scale = grown.model.layers[0].attention.q.scale_tokens
    assert scale.item() != 48
    grown.save_pretrained(tmp_path)
    again = tokenformer.TokenformerForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(logits(again.eval()), logits(grown.eval()))
    larger, report = tokenformer.grow(again, qkv_tokens=96, init="clone")
    assert relative_change(logits(grown), logits(larger)) < 1e-12
    assert larger.model.layers[0].attention.q.scale_tokens.item() == pytest.approx(2 * scale.item())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ffn_tokens": 95}, "ffn of layer 0 has 96 tokens, more than 95"),
        ({"qkv_tokens": [24, 23]}, "q of layer 1 has 24 tokens"),
        ({"to": "354m"}, "cannot change hidden_size from 32 to 768"),
        ({"to": "354m", "ffn_tokens": 100}, "give either"),
        ({}, "give either"),
        ({"to": "355m"}, "preset '355m' is unknown"),
        ({"ffn_tokens": 100, "init": "zeros"}, "init='zeros' is unknown"),
        ({"ffn_tokens": 100, "scale": "cold"}, "scale='cold' is unknown"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(make_config, options, message):
    model, _ = trained_tokenformer(make_config)
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        tokenformer.grow(model, **options)


@pytest.mark.parametrize("init", ["zero", "clone"])
def test_zero_keys_are_refused_for_softmax(make_config, init):
    model, _ = trained_tokenformer(make_config, theta="softmax")
    with pytest.raises(ValueError, match="softmax"):
        tokenformer.grow(model, ffn_tokens=100, init=init)


def test_the_report_prints_and_saves(make_config, tmp_path):
    model, _ = trained_tokenformer(make_config)
    _, report = tokenformer.grow(model, qkv_tokens=48, output_tokens=48, ffn_tokens=192)
    text = str(report)
    assert "model.layers.*.attention.q" in text
    assert "tokens, zero" in text
    report.save(tmp_path / "growth.json")
    saved = json.loads((tmp_path / "growth.json").read_text())
    assert saved["max_layer_change"] == report.max_layer_change
    assert len(saved["parts"]) == 10
