"""The growth baselines: which are exact, and how optimizer state and averages follow."""

import copy
import json

import pytest
import torch

import tokenformer
from tests.support.growth import (
    compute_gradients,
    expected_gradient,
    logits,
    relative_change,
    train_once,
    trained_transformer,
)
from tokenformer.growth.grown_optimizer import grow_average
from tokenformer.growth.parameter_mapping import match_dtype
from tokenformer.growth.transformer.methods import METHODS
from tokenformer.growth.transformer.target_config import target_config

EXACT = {torch.float32: 1e-5, torch.float64: 1e-12}
WIDE, DEEP = {"hidden_size": 64}, {"num_hidden_layers": 5}
UNEVEN = {"hidden_size": 48, "intermediate_size": 57}
ALL = {"hidden_size": 96, "intermediate_size": 130, "num_hidden_layers": 3}
GROWTHS = {
    "net2net wide": {"method": "net2net", **WIDE},
    "net2net deep": {"method": "net2net", **DEEP},
    "net2net units": {"method": "net2net", "intermediate_size": 57},
    "net2net all": {"method": "net2net", **ALL},
    "hypercloning": {"method": "hypercloning", **WIDE, "intermediate_size": 120},
    "bert2bert_fpi": {"method": "bert2bert_fpi", "hidden_size": 96},
    "lemon units": {"method": "lemon", "intermediate_size": 57},
    "lemon even": {"method": "lemon", **WIDE, "unevenness": 0.0},
}
"""Exact, and each new gradient a multiple of an old one."""
UNEQUAL = {
    "net2net noise": {"method": "net2net", **ALL, "noise": 0.3},
    "hypercloning noise": {"method": "hypercloning", "hidden_size": 96, "noise": 0.3},
    "lemon wide": {"method": "lemon", **WIDE},
    "lemon uneven": {"method": "lemon", **UNEVEN},
    "lemon all": {"method": "lemon", **ALL, "hidden_size": 112},
}
"""Exact, and replicas told apart."""
VARIANTS = {
    "plain": {},
    "rms": {"norm": "rms_norm"},
    "grouped": {"num_key_value_heads": 2},
    "gated": {"mlp": "swiglu"},
    "untied": {"tie_word_embeddings": False, "final_norm_parameters": "bias"},
    "learned": {"positions": "learned", "norm_parameters": "weight_bias"},
    "parallel": {"residual": "parallel", "norm_parameters": "bias", "norm": "rms_norm"},
}


def replicas(report, name):
    """Pairs of rows of one parameter that copy the same old row."""
    seen = {}
    for row, source in enumerate(report.mappings[name].rows.tolist()):
        if source in seen:
            yield seen[source], row
        seen.setdefault(source, row)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("growth", [*GROWTHS, *UNEQUAL])
def test_exact_methods_are_exact_in_every_kind_of_model(make_config, variant, growth):
    model, _ = trained_transformer(make_config, torch.float64, **VARIANTS[variant])
    grown, report = tokenformer.grow(model, **(GROWTHS | UNEQUAL)[growth])
    assert report.exact
    assert relative_change(logits(model), logits(grown)) < EXACT[torch.float64]
    assert report.max_output_change < EXACT[torch.float64]
    assert report.parameters_after == grown.num_parameters() > model.num_parameters()


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("growth", ["net2net all", "hypercloning noise", "lemon all"])
def test_twice_and_after_saving(make_config, tmp_path, growth, dtype):
    model, _ = trained_transformer(make_config, dtype)
    first = logits(model)
    options = (GROWTHS | UNEQUAL)[growth]
    again = {"lemon all": {"hidden_size": 136, "num_hidden_layers": 4}}.get(
        growth, {"hidden_size": 192}
    )
    for place, sizes in enumerate([options, {**options, "intermediate_size": 480, **again}]):
        grown, _ = tokenformer.grow(model, **sizes, seed=place)
        grown.save_pretrained(tmp_path / str(place))
        model = tokenformer.TransformerForCausalLM.from_pretrained(
            tmp_path / str(place), dtype=dtype
        ).eval()
        assert relative_change(first, logits(model)) < EXACT[dtype]
    assert model.config.hidden_size == again["hidden_size"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("growth", GROWTHS)
def test_gradients_are_those_the_origins_foretell(make_config, variant, growth):
    model, _ = trained_transformer(make_config, torch.float64, **VARIANTS[variant])
    grown, report = tokenformer.grow(model, **GROWTHS[growth])
    for each in (model, grown):
        compute_gradients(each)
    compared = 0
    for name, parameter in grown.named_parameters():
        expected = expected_gradient(model, report, name)
        if expected is not None:
            assert torch.allclose(parameter.grad, expected, rtol=1e-7, atol=1e-13), name
            compared += 1
    assert compared >= len(list(model.named_parameters()))


@pytest.mark.parametrize("growth", GROWTHS)
def test_an_origin_says_what_the_weights_are(make_config, growth):
    model, _ = trained_transformer(make_config, torch.float64)
    grown, report = tokenformer.grow(model, **GROWTHS[growth])
    for name, parameter in grown.named_parameters():
        mapping = report.mappings[name]
        if mapping.source is not None:
            assert torch.equal(parameter, mapping.apply(model.get_parameter(mapping.source))), name


def test_new_query_heads_may_join_old_key_value_heads(make_config):
    model, _ = trained_transformer(make_config, torch.float64)
    sizes = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 4}
    for method in ("net2net", "hypercloning", "lemon"):
        grown, report = tokenformer.grow(model, **sizes, method=method)
        assert grown.config.num_key_value_heads == 4
        assert report.max_output_change < EXACT[torch.float64]
        for each in (model, grown):
            compute_gradients(each)
        if method != "lemon":
            name = "model.layers.0.attention.k.weight"
            found = grown.get_parameter(name).grad
            assert torch.allclose(
                found, expected_gradient(model, report, name), rtol=1e-7, atol=1e-13
            )


@pytest.mark.parametrize("growth", ["net2net all", "hypercloning", "lemon uneven"])
def test_the_optimizer_follows(make_config, growth):
    model, _ = trained_transformer(make_config)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    for _ in range(3):
        train_once(model, optimizer)
    grown, report = tokenformer.grow(model, **(GROWTHS | UNEQUAL)[growth])
    larger = tokenformer.grow_optimizer(optimizer, report)
    held = [{id(p) for p in group["params"]} for group in larger.param_groups]
    assert len(held) == 2, "a new layer's matrices decay as the old ones do"
    for name, parameter in grown.named_parameters():
        assert id(parameter) in held[parameter.ndim > 1], name
        mapping = report.mappings[name]
        if mapping.source is None:
            assert parameter not in larger.state
            continue
        known = optimizer.state[model.get_parameter(mapping.source)]
        scale = match_dtype(mapping.gradient_scale, parameter)
        for key, power in (("exp_avg", 1), ("exp_avg_sq", 2)):
            expected = mapping.gather(known[key]) * scale**power
            assert torch.allclose(larger.state[parameter][key], expected), name
    before = grown.lm_head.weight.detach().clone()
    train_once(grown, larger)
    assert not torch.equal(before, grown.lm_head.weight)


@pytest.mark.parametrize("growth", ["net2net all", "hypercloning noise", "lemon all"])
def test_an_average_follows_exactly(make_config, growth):
    model, _ = trained_transformer(make_config, torch.float64)
    grown, report = tokenformer.grow(model, **(GROWTHS | UNEQUAL)[growth])
    average, larger = copy.deepcopy(model), copy.deepcopy(grown)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
        for name, parameter in larger.named_parameters():
            mapping = report.mappings[name]
            if mapping.source is not None:
                was, old = (
                    average.get_parameter(mapping.source),
                    model.get_parameter(mapping.source),
                )
                parameter.copy_(grow_average(was, old, grown.get_parameter(name), mapping))
    assert relative_change(logits(average), logits(larger)) < EXACT[torch.float64]
    assert relative_change(logits(average), logits(grown)) > 1e-3


@pytest.mark.parametrize("growth", ["net2net wide", "hypercloning", *UNEQUAL])
def test_replicas_part_ways_where_that_is_promised_and_only_there(make_config, growth):
    """Net2Net's and HyperCloning's without noise are equal for ever."""
    model, _ = trained_transformer(make_config, torch.float64)
    grown, report = tokenformer.grow(model, **(GROWTHS | UNEQUAL)[growth])
    train_once(grown, torch.optim.SGD(grown.parameters(), lr=0.5))
    for name in ("attention.q", "attention.k", "attention.v", "ffn.up", "attention.o", "ffn.down"):
        name = f"model.layers.0.{name}.weight"
        matrix = grown.get_parameter(name).detach()
        source = report.mappings[name].rows
        pairs = [pair for pair in replicas(report, name) if source[pair[0]] >= 0]
        assert pairs or growth == "lemon uneven"
        for one, two in pairs:
            close = torch.allclose(matrix[one], matrix[two], rtol=1e-9, atol=1e-12)
            assert close == (growth not in UNEQUAL), name


@pytest.mark.parametrize(
    "options",
    [
        {"method": "net2net", **UNEVEN},
        {"method": "bert2bert_fpi", **DEEP},
        {"method": "bert2bert_aki", **WIDE},
        {"method": "block_padding", **WIDE},
        {"method": "block_padding", "intermediate_size": 60},
        {"method": "stacking", **DEEP},
    ],
    ids=str,
)
def test_what_is_not_preserved_is_reported(make_config, options):
    model, _ = trained_transformer(make_config)
    grown, report = tokenformer.grow(model, **options)
    assert report.exact is False
    assert f"{options['method']}, not exact" in str(report)
    assert report.max_output_change > 1e-3
    assert report.parameters_after == grown.num_parameters()


def test_the_report_prints_and_saves(make_config, tmp_path):
    model, _ = trained_transformer(make_config)
    _, report = tokenformer.grow(model, **WIDE, num_hidden_layers=3, seed=2)
    text = str(report)
    assert "net2net, exact" in text
    assert "model.layers.*.attention.q 32 x 32 64 x 64" in " ".join(text.split())
    report.save(tmp_path / "growth.json")
    saved = json.loads((tmp_path / "growth.json").read_text())
    parts = {part["name"]: (part["before"], part["after"]) for part in saved["parts"]}
    assert parts["model.layers.0.ffn.down"] == ([32, 40], [64, 80])
    assert [place for place, (before, _) in parts.items() if not before]  # of the new layer
    assert saved["exact"] is True
    assert saved["max_output_change"] == report.max_output_change


def test_the_same_seed_draws_the_same_and_leaves_everything_alone(make_config):
    model, _ = trained_transformer(make_config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.manual_seed(5)
    drawn = torch.rand(3)
    for method in set(METHODS) - {"ligo", "stacking", "hypercloning"}:
        torch.manual_seed(5)
        one, two, other = (
            tokenformer.grow(model, **WIDE, method=method, seed=seed)[0] for seed in (3, 3, 4)
        )
        name = "model.layers.1.ffn.up.weight"
        assert torch.equal(one.get_parameter(name), two.get_parameter(name))
        assert not torch.equal(one.get_parameter(name), other.get_parameter(name))
        assert torch.equal(torch.rand(3), drawn), "nobody else's generator is touched"
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.add_(1.0)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_half_precision_stays(make_config):
    model, _ = trained_transformer(make_config)
    for options in ({"method": "lemon", **UNEVEN}, {"method": "block_padding", **WIDE}):
        grown, _ = tokenformer.grow(model.bfloat16(), **options)
        assert {p.dtype for p in grown.parameters()} == {torch.bfloat16}


def test_presets_and_configurations_name_sizes(make_config):
    small = tokenformer.TransformerConfig.from_preset("124m", vocab_size=61)
    large = target_config(small, "354m", {})
    assert (large.hidden_size, large.num_attention_heads) == (1408, 22)
    assert (large.intermediate_size, large.vocab_size) == (5632, 61)
    model, _ = trained_transformer(make_config, torch.float64)
    to = make_config("transformer", hidden_size=64, num_attention_heads=8, intermediate_size=90)
    grown, report = tokenformer.grow(model, to)
    assert grown.config.intermediate_size == 90
    assert grown.config.initializer_range == 0.2, "what is no size stays"
    assert report.max_output_change < EXACT[torch.float64]
    grown, _ = tokenformer.grow(model, num_attention_heads=12)
    assert grown.config.hidden_size == 96
    assert grown.config.intermediate_size == 120


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give either a size"),
        ({"hidden_size": 16}, "hidden_size=16 is less than the model's 32"),
        ({"num_hidden_layers": 1}, "cannot shrink"),
        ({"hidden_size": 36}, "must be a multiple of 8, the size of a head"),
        ({"hidden_size": 64, "num_attention_heads": 4}, "head size of 16"),
        ({"intermediate_size": 80, "to": "354m"}, "give either a size"),
        ({"to": "354m"}, "head size of 64"),
        ({"to": "huge"}, "preset 'huge' is unknown"),
        ({"hidden_size": 64, "method": "net3net"}, "method='net3net' is unknown"),
        ({"hidden_size": 64, "method": "tokens"}, "has no tokens to grow"),
        ({"ffn_tokens": 100}, "'ffn_tokens' is not an option of net2net"),
        ({"hidden_size": 64, "method": "lemon", "noise": 0.1}, "'noise' is not an option of lemon"),
        ({"hidden_size": 64, "noise": 2.0}, "noise=2.0 must be"),
        ({"hidden_size": 64, "method": "lemon", "unevenness": 1.0}, "unevenness=1.0 must be"),
        ({"hidden_size": 48, "method": "hypercloning"}, "whole multiple of 32"),
        ({"num_hidden_layers": 4, "method": "hypercloning"}, "hypercloning changes only the width"),
        ({"hidden_size": 64, "method": "stacking"}, "stacking changes only the depth"),
        ({"hidden_size": 64, "method": "ligo"}, "ligo is trained on data"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_in_one_line(make_config, options, message):
    model = tokenformer.TransformerForCausalLM(make_config("transformer"))
    with pytest.raises(ValueError, match=message) as refused:
        tokenformer.grow(model, **options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 62}, "cannot change vocab_size from 61 to 62"),
        ({"norm": "rms_norm"}, "cannot change norm"),
        ({"num_key_value_heads": 8, "num_attention_heads": 8}, None),
    ],
    ids=str,
)
def test_a_configuration_must_agree_in_what_is_no_size(make_config, changes, message):
    model = tokenformer.TransformerForCausalLM(make_config("transformer", num_key_value_heads=2))
    shape = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
    to = make_config("transformer", **{**shape, **changes})
    with pytest.raises(ValueError, match=message or "leaves 1 query heads per"):
        tokenformer.grow(model, to)
    with pytest.raises(ValueError, match="not a TokenformerConfig"):
        tokenformer.grow(model, make_config("tokenformer"))


def test_a_tied_head_needs_a_norm_to_carry_the_shares(make_config):
    model, _ = trained_transformer(make_config, torch.float64, final_norm_parameters="bias")
    for method in ("net2net", "hypercloning", "lemon", "bert2bert_aki"):
        with pytest.raises(ValueError, match="needs a final norm with a weight"):
            tokenformer.grow(model, **WIDE, method=method)
    _, report = tokenformer.grow(model, intermediate_size=60)
    assert report.max_output_change < EXACT[torch.float64], "the stream has stayed as it was"


def test_a_tokenformer_grows_by_tokens_alone(make_config):
    model = tokenformer.TokenformerForCausalLM(make_config("tokenformer"))
    _, report = tokenformer.grow(model, ffn_tokens=50, method="tokens")
    assert report.method == "tokens"
    with pytest.raises(ValueError, match="grows by its tokens"):
        tokenformer.grow(model, hidden_size=64, method="net2net")


def test_what_is_no_language_model_of_ours_is_refused(make_config):
    from transformers import GPT2Config, GPT2LMHeadModel

    with pytest.raises(TypeError, match="not a TransformerModel"):
        tokenformer.grow(tokenformer.TransformerModel(make_config("transformer")), **WIDE)
    small = GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=8, n_positions=8)
    with pytest.raises(TypeError, match="not a GPT2LMHeadModel"):
        tokenformer.grow(GPT2LMHeadModel(small), ffn_tokens=100)
