"""Configurations refuse invalid options and survive JSON."""

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, GenerationConfig

from tokenformer import TokenformerConfig, TokenformerVisionConfig, TransformerConfig

Make = Callable[..., Any]

BAD_COUNTS = [0, -1, 2.0, "8", True]
BAD_OPTIONS = [
    ({"variant": "relased"}, ["variant", "'relased'", "released, paper"]),
    ({"variant": None}, ["variant", "None", "released, paper"]),
    ({"positions": "alibi"}, ["positions", "'alibi'", "rotary, learned, none"]),
    ({"norm": "batch_norm"}, ["norm", "'batch_norm'", "layer_norm, rms_norm"]),
    ({"norm": None}, ["norm", "None", "layer_norm, rms_norm"]),
    ({"norm_parameters": "all"}, ["norm_parameters", "'all'", "none, bias, weight, weight_bias"]),
    ({"final_norm_parameters": 1}, ["final_norm_parameters", "1", "weight_bias"]),
    ({"residual": "pre"}, ["residual", "'pre'", "sequential, parallel"]),
    ({"hidden_act": "relu"}, ["hidden_act", "'relu'", "gelu, gelu_tanh"]),
    ({"tie_word_embeddings": "no"}, ["tie_word_embeddings", "'no'", "True, False"]),
    ({"use_cache": 3}, ["use_cache", "3", "True, False"]),
    ({"hidden_size": 30}, ["hidden_size=30", "num_attention_heads=4"]),
    ({"num_key_value_heads": 3}, ["num_attention_heads=4", "num_key_value_heads=3"]),
    ({"num_key_value_heads": 8}, ["num_attention_heads=4", "num_key_value_heads=8"]),
    ({"rotary_fraction": 0.0}, ["rotary_fraction=0.0", "above 0"]),
    ({"rotary_fraction": 1.5}, ["rotary_fraction=1.5", "(0, 1]"]),
    ({"rotary_fraction": "0.25"}, ["rotary_fraction='0.25'", "number"]),
    ({"rotary_fraction": math.nan}, ["rotary_fraction=nan", "finite"]),
    ({"rotary_fraction": 0.4}, ["rotary_fraction=0.4", "3 channels", "even"]),
    ({"rotary_base": 0}, ["rotary_base=0", "above 0"]),
    ({"norm_eps": -1e-5}, ["norm_eps=-1e-05", "at least 0"]),
    ({"norm_eps": None}, ["norm_eps=None", "at least 0"]),
    ({"initializer_range": -0.02}, ["initializer_range=-0.02", "at least 0"]),
    ({"head_dim": 16}, ["head_dim=16", "not an option"]),
]
BAD_TOKENFORMER_OPTIONS = [
    ({"theta": "l3_gelu"}, ["theta", "'l3_gelu'", "l2_gelu, gelu_l2, l1_gelu, softmax"]),
    ({"theta_eps": -1.0}, ["theta_eps=-1.0", "at least 0"]),
    ({"qkv_tokens": [4]}, ["qkv_tokens=[4]", "one entry per layer, 2"]),
    ({"ffn_tokens": [4, 0]}, ["ffn_tokens=0", "at least 1"]),
    ({"k_tokens": [4, 2.5]}, ["k_tokens=2.5", "whole number"]),
    ({"scale_tokens": [1.0, 2.0]}, ["scale_tokens=[1.0, 2.0]", "q, k, v, o, ffn"]),
    ({"scale_tokens": {"mlp": [1.0, 2.0]}}, ["scale_tokens", "'mlp'", "q, k, v, o, ffn"]),
    ({"scale_tokens": {"q": [1.0]}}, ["scale_tokens['q']=[1.0]", "one entry per layer, 2"]),
    ({"scale_tokens": {"q": 3.0}}, ["scale_tokens['q']=3.0", "one entry per layer, 2"]),
    ({"scale_tokens": {"o": [None, -2.0]}}, ["scale_tokens['o']", "-2.0", "above 0"]),
    ({"scale_tokens": {"o": [None, "2"]}}, ["scale_tokens['o']", "'2'", "above 0"]),
    ({"scale_tokens": {"o": [None, math.inf]}}, ["scale_tokens['o']", "inf", "finite"]),
    ({"active_groups": 4}, ["active_groups=4", "dict", "q, k, v, o, ffn"]),
    ({"active_groups": {"mlp": 4}}, ["active_groups", "'mlp'", "q, k, v, o, ffn"]),
    ({"active_groups": {"ffn": 3}}, ["active_groups['ffn']=3", "at most 2", "of its 44 tokens"]),
    ({"active_groups": {"ffn": 0}}, ["active_groups['ffn']=0", "at least 1"]),
    ({"active_groups": {"ffn": 1.5}}, ["active_groups['ffn']=1.5", "whole number"]),
    ({"active_groups": {"ffn": [1]}}, ["active_groups['ffn']=[1]", "one entry per layer, 2"]),
    ({"group_size": 0}, ["group_size=0", "at least 1"]),
    ({"router": "hash"}, ["router", "'hash'", "centroid, learned"]),
    ({"theta_norm": "some"}, ["theta_norm", "'some'", "all, chosen"]),
    (
        {"theta": "softmax", "theta_norm": "all", "active_groups": {"ffn": 1}},
        ["theta_norm='all'", "theta='softmax'", "must", "'chosen'"],
    ),
    ({"thresholds": {"mlp": [0.1, 0.1]}}, ["thresholds", "'mlp'", "q, k, v, o, ffn"]),
    ({"thresholds": {"ffn": [0.1]}}, ["thresholds['ffn']=[0.1]", "one entry per layer, 2"]),
    ({"thresholds": {"ffn": [None, -1.0]}}, ["thresholds['ffn']=-1.0", "at least 0"]),
    (
        {"thresholds": {"ffn": [None, 0.1]}, "active_groups": {"ffn": 1}},
        ["ffn of layer 1", "active_groups", "thresholds", "one of them"],
    ),
    ({"balance_rate": -0.1}, ["balance_rate=-0.1", "at least 0"]),
]
COUNTS = [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
]
TOKEN_COUNTS = [f"{name}_tokens" for name in ("qkv", "output", "ffn", "q", "k", "v")]


def refusal(make: Callable[[], Any]) -> str:
    """The message; a ValueError from deep inside, such as that of int("x"), is no refusal."""
    with pytest.raises(ValueError, match=r"must|choose|did you mean|not an option") as caught:
        make()
    return str(caught.value)


@pytest.mark.parametrize(("options", "words"), BAD_OPTIONS, ids=str)
def test_bad_option_is_refused_by_name(
    make_config: Make, family: str, options: dict[str, Any], words: list[str]
) -> None:
    message = refusal(lambda: make_config(family, **options))
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(("options", "words"), BAD_TOKENFORMER_OPTIONS, ids=str)
def test_bad_token_option_is_refused_by_name(
    make_config: Make, options: dict[str, Any], words: list[str]
) -> None:
    message = refusal(lambda: make_config("tokenformer", **options))
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize("count", BAD_COUNTS, ids=repr)
def test_counts_are_whole_numbers_of_at_least_one(make_config: Make, count: Any) -> None:
    names_of = {
        "tokenformer": [*COUNTS, *TOKEN_COUNTS],
        "transformer": [*COUNTS, "intermediate_size"],
    }
    for family, names in names_of.items():
        for name in names:
            message = refusal(lambda f=family, n=name: make_config(f, **{n: count}))
            assert f"{name}={count!r}" in message
            assert "whole number of at least 1" in message


def test_swiglu_is_a_choice_of_the_transformer(make_config: Make) -> None:
    message = refusal(lambda: make_config("transformer", mlp="relu"))
    assert "mlp" in message
    assert "gelu, swiglu" in message


@pytest.mark.parametrize(
    ("typo", "right"),
    [
        ("hiden_size", "hidden_size"),
        ("num_hidden_layer", "num_hidden_layers"),
        ("num_key_values_heads", "num_key_value_heads"),
        ("tie_word_embedding", "tie_word_embeddings"),
        ("rotary_frac", "rotary_fraction"),
        ("norm_parameter", "norm_parameters"),
        ("varient", "variant"),
    ],
)
def test_mistyped_name_is_refused_with_the_right_one(
    make_config: Make, family: str, typo: str, right: str
) -> None:
    message = refusal(lambda: make_config(family, **{typo: 1}))
    assert repr(typo) in message
    assert repr(right) in message


def test_mistyped_token_name_is_refused_with_the_right_one(make_config: Make) -> None:
    for typo, right in [("qvk_tokens", "qkv_tokens"), ("scale_token", "scale_tokens")]:
        assert repr(right) in refusal(lambda t=typo: make_config("tokenformer", **{t: 1}))


def test_keys_of_transformers_itself_are_no_typos(make_config: Make, family: str) -> None:
    """Older config.json files carry generation settings, which transformers takes out again."""
    settings = GenerationConfig._get_default_generation_params()
    assert len(settings) > 20
    common = {"torch_dtype": "float32", "output_attentions": False, "num_labels": 3}
    config = make_config(family, **{**settings, **common, "attn_implementation": "eager"})
    assert config._attn_implementation == "eager"
    assert config.num_labels == 3


def test_keys_of_a_future_version_still_load(
    make_config: Make, family: str, tmp_path: Path
) -> None:
    make_config(family).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "mixture_of_depths": {"k": 2}}))
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.hidden_size == 32
    assert config.mixture_of_depths == {"k": 2}


ROUND_TRIPS = [
    ("tokenformer", {}),
    (
        "tokenformer",
        {
            "qkv_tokens": [8, 12],
            "output_tokens": (5, 6),
            "ffn_tokens": 17,
            "k_tokens": [3, 4],
            "v_tokens": 9,
            "scale_tokens": {"q": [None, 7.5], "ffn": [16, None]},
        },
    ),
    # Options that differ from what their variant implies must not be lost to the variant.
    (
        "tokenformer",
        {"variant": "paper", "positions": "rotary", "hidden_act": "gelu", "theta_eps": 0.0},
    ),
    ("tokenformer", {"variant": "released", "positions": "none", "hidden_act": "gelu_tanh"}),
    ("tokenformer", {"theta": "softmax", "theta_eps": 1e-3, "tie_word_embeddings": False}),
    ("tokenformer", {"active_groups": {"ffn": 2, "q": [None, 3]}, "group_size": 8}),
    ("tokenformer", {"thresholds": {"ffn": [0.1, None], "o": [0.0, 2]}}),
    ("tokenformer", {"active_groups": {"ffn": 2}, "router": "learned", "theta_norm": "chosen"}),
    ("transformer", {"mlp": "swiglu", "intermediate_size": None, "norm": "rms_norm"}),
    (
        "transformer",
        {
            "variant": "paper",
            "positions": "learned",
            "num_key_value_heads": 2,
            "residual": "parallel",
            "norm_parameters": "bias",
            "eos_token_id": [3, 4],
        },
    ),
]


@pytest.mark.parametrize(("family", "options"), ROUND_TRIPS, ids=str)
def test_json_round_trip(
    make_config: Make, tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    config = make_config(family, **options)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is type(config)
    stated = {name: value for name, value in options.items() if value is not None}
    for name, value in stated.items():
        assert getattr(loaded, name) == (list(value) if isinstance(value, tuple) else value)
    unstable = ("transformers_version", "_name_or_path")
    before, after = (
        {name: value for name, value in one.to_dict().items() if name not in unstable}
        for one in (config, loaded)
    )
    assert after == before
    assert type(config).from_dict(json.loads(config.to_json_string())).to_diff_dict() == (
        config.to_diff_dict()
    )


def test_token_counts_are_independent_and_per_layer(make_config: Make) -> None:
    config = make_config(
        "tokenformer",
        qkv_tokens=[10, 11],
        k_tokens=12,
        v_tokens=[13, 14],
        output_tokens=15,
        ffn_tokens=[16, 17],
    )
    counts = {name: [config.tokens(name, 0), config.tokens(name, 1)] for name in "qkvo"}
    assert counts == {"q": [10, 11], "k": [12, 12], "v": [13, 14], "o": [15, 15]}
    assert [config.tokens("ffn", layer) for layer in (0, 1)] == [16, 17]


def test_scale_is_the_token_count_unless_given(make_config: Make) -> None:
    config = make_config(
        "tokenformer", q_tokens=[10, 11], scale_tokens={"q": [None, 2.5], "o": [7, None]}
    )
    assert [config.scale("q", layer) for layer in (0, 1)] == [10.0, 2.5]
    assert [config.scale("o", layer) for layer in (0, 1)] == [7.0, 20.0]
    assert [config.scale("ffn", layer) for layer in (0, 1)] == [44.0, 44.0]


@pytest.mark.parametrize(
    ("variant", "implied"),
    [
        ("released", {"hidden_act": "gelu", "positions": "rotary", "theta_eps": 0.0}),
        ("paper", {"hidden_act": "gelu_tanh", "positions": "none", "theta_eps": 1e-5}),
    ],
)
def test_variant_fills_missing_options(
    make_config: Make, variant: str, implied: dict[str, Any]
) -> None:
    config = make_config("tokenformer", variant=variant)
    assert {name: getattr(config, name) for name in implied} == implied
    assert make_config("tokenformer", variant=variant, positions="learned").positions == "learned"


def test_defaults_follow_the_hidden_size() -> None:
    config = TokenformerConfig(hidden_size=96)
    assert (config.qkv_tokens, config.output_tokens, config.ffn_tokens) == (96, 96, 384)
    assert TransformerConfig(hidden_size=96).intermediate_size == 384
    # Three matrices of 8/3 d have the parameters of two matrices of 4 d.
    assert TransformerConfig(hidden_size=768, mlp="swiglu").intermediate_size == 2048
    assert TransformerConfig(hidden_size=96, mlp="swiglu").intermediate_size == 256


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("num_layers", "num_hidden_layers"),
        ("n_head", "num_attention_heads"),
        ("dim", "hidden_size"),
    ],
)
def test_the_names_of_other_libraries_are_refused_with_ours(make_config, family, given, meant):
    with pytest.raises(ValueError, match=f"'{given}' is not an option; did you mean '{meant}'"):
        make_config(family, **{given: 2})


@pytest.mark.parametrize(
    ("family", "option", "home"),
    [("tokenformer", "mlp", "TransformerConfig"), ("transformer", "theta", "TokenformerConfig")],
)
def test_an_option_of_the_other_family_is_refused(make_config, family, option, home):
    with pytest.raises(ValueError, match=f"'{option}' is an option of {home} only"):
        make_config(family, **{option: "gelu"})


def annotate(folder: Path, **keys: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


def test_foreign_keys_survive_loading_and_saving(
    make_config: Make, family: str, tmp_path: Path
) -> None:
    """The constructor refuses them, but other tools annotate config.json with such names."""
    foreign = {"num_layers": 2, "n_ctx": 64, "depth": 7, "note": {"by": "a tool"}}
    config = make_config(family)
    for name, value in foreign.items():
        setattr(config, name, value)
    config.save_pretrained(tmp_path / "first")
    loaded = AutoConfig.from_pretrained(tmp_path / "first")
    loaded.save_pretrained(tmp_path / "second")
    for found in (loaded, type(config).from_pretrained(tmp_path / "second")):
        assert {name: getattr(found, name) for name in foreign} == foreign
        assert found.num_hidden_layers == 2
    changed, unused = type(config).from_pretrained(
        tmp_path / "first", depth=8, other=1, return_unused_kwargs=True
    )
    assert changed.depth == 8
    assert unused == {"other": 1}


def test_a_synonym_with_another_value_is_warned_of(
    make_config: Make, family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_config(family).save_pretrained(tmp_path)
    annotate(tmp_path, num_layers=9)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    logging.Logger.warning_once.cache_clear()  # transformers': each message is shown once
    ours = logging.getLogger("tokenformer.models.block_configuration")
    ours.addHandler(caplog.handler)
    try:
        AutoConfig.from_pretrained(tmp_path)
    finally:
        logger.removeHandler(caplog.handler)
        ours.removeHandler(caplog.handler)
    assert "num_layers=9 has no effect; the option is num_hidden_layers=2" in (caplog.text)


def test_derived_values_are_accepted_where_they_are_right(
    make_config: Make, family: str, tmp_path: Path
) -> None:
    make_config(family).save_pretrained(tmp_path)
    annotate(tmp_path, head_dim=8, rotary_dim=2)
    assert AutoConfig.from_pretrained(tmp_path).head_dim == 8
    annotate(tmp_path, head_dim=16)
    assert "head_dim=16 is not an option; the other options imply 8" in refusal(
        lambda: AutoConfig.from_pretrained(tmp_path)
    )


def test_option_names() -> None:
    """What a recipe may set: neither derived values nor the bookkeeping of transformers."""
    tokens, matrices, images = (
        set(config.option_names())
        for config in (TokenformerConfig, TransformerConfig, TokenformerVisionConfig)
    )
    assert {"hidden_size", "qkv_tokens", "rotary_base", "attn_implementation"} <= tokens
    assert {"intermediate_size", "mlp"} <= matrices - tokens
    assert {"patch_size", "num_labels", "num_classes"} <= images
    assert not {"head_dim", "architectures", "foo"} & (tokens | matrices | images)


def test_auto_map_can_be_read_but_is_not_saved_empty(make_config: Make, family: str) -> None:
    """TRL reads it from every configuration that it loads from a folder."""
    config = make_config(family)
    assert config.auto_map == {}
    assert "auto_map" not in config.to_dict()
    config.auto_map["AutoConfig"] = "module.Class"
    assert type(config).from_dict(config.to_dict()).auto_map == {"AutoConfig": "module.Class"}
    assert make_config(family).auto_map == {}
