"""Converted Transformers: exact where possible, and the error is reported elsewhere."""

import json

import pytest
import torch
import torch.nn.functional as F

from tokenformer import TokenformerForCausalLM
from tokenformer.convert.pretrained.from_transformer import from_transformer

HEAVY = 1e5
NORMED = [  # every exact kind: after a layer norm
    ("gpt2", {}),
    ("gpt2", {"n_inner": 40, "activation_function": "gelu", "tie_word_embeddings": False}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("gpt_neox", {"rotary_pct": 0.5}),
    ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    ("transformer", {"norm_parameters": "weight_bias", "num_key_value_heads": 2}),
    ("transformer", {"variant": "paper", "residual": "parallel", "tie_word_embeddings": False}),
]
OUTPUT = {"gpt2": "attn.c_proj", "gpt_neox": "attention.dense", "transformer": "attention.o"}


def logits(model, tokens):
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits


def leave_channel_unused(model, kind):
    """Zero the output weights of the first value channels, so that replacing them is exact."""
    for name, module in model.named_modules():
        if name.endswith(OUTPUT[kind]):
            channels = module.weight.data if kind == "gpt2" else module.weight.data.T  # [d, out]
            shared = model.config.num_attention_heads // getattr(
                model.config, "num_key_value_heads", model.config.num_attention_heads
            )
            for group in range(shared):
                channels[8 * group] = 0.0


@pytest.mark.parametrize("linear", ["pair", "shift"])
@pytest.mark.parametrize(("kind", "options"), NORMED)
def test_a_model_with_a_channel_to_spare_is_exact_as_a_whole(make_source, kind, options, linear):
    source = make_source(kind, **options)
    leave_channel_unused(source, kind)
    model, report = from_transformer(source, linear=linear, ballast=HEAVY)
    tokens = torch.randint(61, (3, 40))
    wanted, found = logits(source, tokens), logits(model, tokens)
    assert ((found - wanted).norm() / wanted.norm()).item() < 1e-8
    assert report.max_error < 1e-8
    assert report.comparison.agreement == 1
    assert wanted.std() > 0.1  # the source says something


@pytest.mark.parametrize(("kind", "options"), NORMED)
def test_without_one_all_but_the_output_projection_is_exact(make_source, batches, kind, options):
    source = make_source(kind, **options)
    _, report = from_transformer(source, batches, ballast=HEAVY)
    errors = {part.name.split(".", 3)[3]: part.error for part in report.maps}
    assert max(error for name, error in errors.items() if name != "attention.o") < 1e-8
    assert 1e-4 < errors["attention.o"] < 0.2  # one of 32 channels of a random model
    assert report.comparison.divergence < 0.05


@pytest.mark.parametrize(
    ("kind", "options", "linear"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}, "pair"),
        ("llama", {}, "shift"),
        ("mistral", {"sliding_window": None}, "shift"),
        ("qwen2", {"tie_word_embeddings": True}, "shift"),
        ("transformer", {"norm": "rms_norm", "mlp": "swiglu", "norm_parameters": "weight"}, "pair"),
    ],
)
def test_rms_norms_and_gates_are_approached(make_source, batches, kind, options, linear):
    """One direction of 32 is given up before every map, and a gated unit is two tokens: coarse in a
    random model, but each map close to its own, and the whole far closer than one of other weights.
    """
    source = make_source(kind, **options)
    model, report = from_transformer(source, batches, linear=linear)
    assert 0 < report.max_error < 0.15
    assert {part.form for part in report.maps} == {linear, "fitted"}
    tokens = torch.cat(batches)[:, :-1]
    wanted = logits(source, tokens)
    others = model, make_source(kind, **options)
    errors = [((logits(m, tokens) - wanted).norm() / wanted.norm()).item() for m in others]
    assert errors[0] < 0.3 < 1 < errors[1]


def test_gates_need_data(make_source):
    for options in ({"norm": "rms_norm"}, {"mlp": "swiglu"}):
        with pytest.raises(ValueError, match="batches is missing"):
            from_transformer(make_source("transformer", **options))


def test_data_halves_the_error_of_the_output_projection_at_least(make_source, batches):
    source = make_source("gpt_neox")
    blind, _ = from_transformer(source)
    seeing, _ = from_transformer(source, batches[:6])
    other = torch.cat(batches[6:])[:, :-1]
    wanted = logits(source, other)
    errors = [(logits(model, other) - wanted).norm() for model in (blind, seeing)]
    assert errors[1] < errors[0] / 2


def test_reported_errors_are_those_of_the_modules(make_source, batches):
    """Computed here by hooks on both models, on the same inputs, without the converter's parts."""
    source = make_source("gpt_neox")
    model, report = from_transformer(source, batches)
    tokens = torch.cat(batches)[:, :-1]
    layer, ours = source.gpt_neox.layers[1], model.model.layers[1]
    seen = {}
    watched = {
        "norm": layer.input_layernorm,
        "mlp_norm": layer.post_attention_layernorm,
        "qkv": layer.attention.query_key_value,
        "mlp": layer.mlp,
    }
    for name, module in watched.items():
        module.register_forward_hook(
            lambda _, inputs, output, name=name: seen.update({name: (inputs[0], output)})
        )
    logits(source, tokens)
    with torch.no_grad():
        normed = ours.attention_norm(seen["norm"][0])
        q, k, _ = seen["qkv"][1].unflatten(-1, (4, 3, 8)).unbind(-2)
        pairs = {
            "attention.q": (ours.attention.q(normed), q.flatten(-2)),
            "attention.k": (ours.attention.k(normed), k.flatten(-2)),
            "ffn": (ours.ffn(ours.ffn_norm(seen["mlp_norm"][0])), seen["mlp"][1]),
        }
    errors = {part.name: part.error for part in report.maps}
    for name, (found, wanted) in pairs.items():
        error = ((found - wanted).norm() / wanted.norm()).item()
        assert error == pytest.approx(errors[f"model.layers.1.{name}"], rel=1e-3)
        assert 0 < error < 1e-4  # the default ballast


def test_the_comparison_is_what_a_direct_computation_gives(make_source, batches):
    source = make_source("gpt2")
    model, report = from_transformer(source, batches, held_out=batches[:2])
    text = torch.cat(batches[:2])
    wanted, found = (logits(m, text[:, :-1]).flatten(0, 1) for m in (source, model))
    targets = text[:, 1:].flatten()
    compared = report.comparison
    assert compared.tokens == targets.numel()
    assert compared.source_loss == pytest.approx(F.cross_entropy(wanted, targets).item())
    assert compared.loss == pytest.approx(F.cross_entropy(found, targets).item())
    p, q = wanted.softmax(-1), found.softmax(-1)
    assert compared.divergence == pytest.approx((p * (p / q).log()).sum(-1).mean().item(), rel=1e-6)


def test_in_fp32_it_generates_what_the_source_generates(make_source):
    source = make_source("gpt2")
    leave_channel_unused(source, "gpt2")
    source = source.float()
    model, report = from_transformer(source)
    assert report.max_error < 1e-4
    prompt = torch.randint(61, (2, 8))
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(source.generate(prompt, **options), model.generate(prompt, **options))


@pytest.mark.parametrize("linear", ["pair", "shift"])
def test_heads_that_share_their_values_are_exact_in_fp32(make_source, linear):
    """Each of them has the constant channel."""
    source = make_source("transformer", num_key_value_heads=1)
    leave_channel_unused(source, "transformer")
    _, report = from_transformer(source.float(), linear=linear)
    assert report.max_error < 1e-4


@pytest.mark.parametrize("linear", ["pair", "shift"])
def test_a_layer_that_adds_nothing_still_adds_nothing(make_source, batches, linear):
    """As those that were put into a model to be trained: their outputs are zero."""
    source = make_source("gpt_neox")
    with torch.no_grad():
        for part in (source.gpt_neox.layers[1].attention.dense, source.gpt_neox.layers[1].mlp):
            for parameter in part.parameters():
                parameter.zero_()
    _, report = from_transformer(source, batches, linear=linear)
    errors = {part.name: part.error for part in report.maps}
    assert errors["model.layers.1.attention.o"] == errors["model.layers.1.ffn"] == 0
    assert report.max_error < 0.2


def test_half_precision_sources_become_fp32(make_source):
    source = make_source("gpt_neox").half()
    model, _ = from_transformer(source)
    assert model.dtype == torch.float32


def test_it_saves_loads_and_grows_like_any_other(make_source, tmp_path):
    import tokenformer

    model, _ = from_transformer(make_source("gpt_neox"))
    model.save_pretrained(tmp_path)
    again = TokenformerForCausalLM.from_pretrained(tmp_path).eval()
    tokens = torch.randint(61, (2, 20))
    assert torch.equal(logits(again, tokens), logits(model, tokens))
    _, report = tokenformer.grow(model, ffn_tokens=100, init="zero")
    assert report.max_output_change < 1e-12


def test_sizes_are_told_as_they_are(make_source):
    source = make_source("transformer", num_key_value_heads=2)
    for linear, per_channel in {"pair": 2, "shift": 1}.items():
        model, report = from_transformer(source, linear=linear)
        config = model.config
        assert config.q_tokens == per_channel * 32 + 2
        assert config.output_tokens == per_channel * (32 - 2) + 2  # without the constant channels
        assert config.k_tokens == config.v_tokens == per_channel * 16 + 2
        assert config.ffn_tokens == 4 * 32 + 2
        assert report.parameters_before == sum(p.numel() for p in source.parameters())
        assert report.parameters_after == sum(p.numel() for p in model.parameters())
        table = str(report)
        assert f"{report.parameters_before:,} -> {report.parameters_after:,} parameters" in table
        assert table.count("attention.v") == 1  # all layers on one line


def test_the_report_is_kept_as_json(make_source, tmp_path):
    _, report = from_transformer(make_source("gpt2"))
    report.save(tmp_path / "conversion.json")
    kept = json.loads((tmp_path / "conversion.json").read_text())
    assert kept["source"] == "gpt2"
    assert len(kept["maps"]) == 10
    assert kept["max_error"] == report.max_error


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("gpt2", {"activation_function": "relu"}, "activation_function='relu'"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False"),
        ("llama", {"head_dim": 16}, "head_dim=16"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("mistral", {"sliding_window": 16}, "window of 16 positions"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "type 'linear'",
        ),
    ],
)
def test_what_cannot_be_had_is_refused(make_source, batches, kind, options, message):
    with pytest.raises(ValueError, match=message):
        from_transformer(make_source(kind, **options), batches)


def test_other_kinds_are_refused_with_a_list_of_those_that_are_not(batches):
    from transformers import OPTConfig, OPTForCausalLM

    tiny = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "ffn_dim": 32}
    source = OPTForCausalLM(OPTConfig(**tiny, num_attention_heads=4, word_embed_proj_dim=32))
    with pytest.raises(ValueError, match="a opt model cannot be converted; supported are gpt2, "):
        from_transformer(source, batches)
