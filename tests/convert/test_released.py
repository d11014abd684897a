"""Released checkpoints convert to equivalent models and back, bit for bit."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import tokenformer
from tests.support.conversion import CONFIG, HEADS, VOCABULARY, make_state, released_logits
from tokenformer.convert.released import (
    convert_released,
    convert_to_released,
    expected_shapes,
    released_names,
)
from tokenformer.convert.source import find_source
from tokenformer.errors import ConversionError

IDS = torch.arange(40).mul(7).remainder(VOCABULARY)


def put(folder: Path, state: Any, config: dict[str, Any] | None = CONFIG) -> Path:
    folder.mkdir()
    torch.save(state, folder / "pytorch_model.bin")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def convert(source: Path, out: Path, **options: Any) -> Any:
    out.mkdir()
    found = find_source(str(source))
    assert found.kind == "released"
    convert_released(found, out, **options)
    return AutoModelForCausalLM.from_pretrained(out)


def back(source: Path, out: Path) -> dict[str, Tensor]:
    out.mkdir()
    convert_to_released(find_source(str(source)), out)
    found: dict[str, Tensor] = torch.load(out / "pytorch_model.bin", weights_only=True)
    return found


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(ids[None]).logits[0]
    return found


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() < 1e-10 * expected.abs().max())


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Names, types and bits."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def test_the_logits_are_those_of_the_released_model(tmp_path):
    state = make_state()
    model = convert(put(tmp_path / "released", state), tmp_path / "ours")
    expected = released_logits(state, IDS)
    assert torch.allclose(logits(model).double(), expected, atol=1e-3, rtol=1e-4)
    assert close(logits(model.double()), expected)


@pytest.mark.parametrize(
    "changed", [{"fraction": 1.0}, {"fraction": 0.5}, {"base": 500.0}, {"heads": 2}], ids=str
)
def test_the_oracle_tells_wrong_rotations_and_heads_apart(changed):
    state = make_state()
    difference = released_logits(state, IDS, **changed) - released_logits(state, IDS)
    assert difference.abs().max() > 0.1


@pytest.mark.parametrize("activation", ["l2_norm_gelu", "gelu_l2_norm", "softmax"])
def test_the_options_of_the_config_are_followed(tmp_path, activation):
    config = {
        "num-attention-heads": 2,
        "rotary-pct": 0.5,
        "rotary_emb_base": 500,
        "norm_activation_type": activation,
        "max-position-embeddings": 77,
    }
    state = make_state()
    model = convert(put(tmp_path / "released", state, config), tmp_path / "ours").double()
    expected = released_logits(state, IDS, heads=2, fraction=0.5, base=500.0, activation=activation)
    assert close(logits(model), expected)
    assert model.config.max_position_embeddings == 77
    assert equal(back(tmp_path / "ours", tmp_path / "back"), state)
    again = convert(tmp_path / "back", tmp_path / "again")
    assert torch.equal(logits(again.double()), logits(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_round_trip_changes_no_bit_and_no_type(tmp_path, dtype):
    state = make_state(dtype)
    model = convert(put(tmp_path / "released", state), tmp_path / "ours")
    assert model.dtype == dtype  # whatever torch_dtype their config has
    stored = load_file(tmp_path / "ours" / "model.safetensors")
    names = released_names(model.config.num_hidden_layers)
    assert equal({names[name]: tensor for name, tensor in stored.items()}, state)
    assert equal(back(tmp_path / "ours", tmp_path / "back"), state)
    convert(tmp_path / "back", tmp_path / "again")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        first, second = ((tmp_path / kind / name).read_bytes() for kind in ("ours", "again"))
        assert first == second, name


def test_half_precision_computes_as_the_oracle_on_the_same_weights(tmp_path):
    state = make_state(torch.float16)
    model = convert(put(tmp_path / "released", state), tmp_path / "ours").double()
    expected = released_logits(state, IDS)
    assert close(logits(model), expected)


def test_our_models_survive_the_way_there_and_back(tmp_path, make_model):
    model = make_model("tokenformer", hidden_size=64, rotary_fraction=0.5).float()
    model.save_pretrained(tmp_path / "ours", max_shard_size="40KB")
    assert (tmp_path / "ours" / "model.safetensors.index.json").exists(), "in several files"
    state = back(tmp_path / "ours", tmp_path / "back")
    assert len(state) == 10 * 2 + 3
    again = convert(tmp_path / "back", tmp_path / "again")
    ids = torch.arange(30)
    assert torch.equal(logits(again, ids), logits(model, ids))
    first, second = (AutoConfig.from_pretrained(tmp_path / kind) for kind in ("ours", "again"))
    assert first.to_diff_dict() == second.to_diff_dict()


def test_a_file_alone_needs_the_heads(tmp_path):
    state = make_state()
    file = put(tmp_path / "released", state, None) / "pytorch_model.bin"
    with pytest.raises(ConversionError, match=r"give --num_attention_heads$"):
        convert(file, tmp_path / "none")
    model = convert(file, tmp_path / "ours", num_attention_heads=HEADS).double()
    expected = released_logits(state, IDS)
    assert close(logits(model), expected)
    assert model.config.max_position_embeddings == 2048


def test_a_config_that_leaves_the_heads_open_needs_them_too(tmp_path):
    folder = put(tmp_path / "released", make_state(), CONFIG | {"num_attention_heads": None})
    with pytest.raises(ConversionError, match=r"give --num_attention_heads$"):
        convert(folder, tmp_path / "none")
    model = convert(folder, tmp_path / "ours", num_attention_heads=HEADS)
    assert model.config.num_attention_heads == HEADS


def test_the_heads_of_a_published_shape_are_hinted_at():
    from tokenformer.convert.released_config import to_ours

    sizes = {"num_hidden_layers": 32, "hidden_size": 1280, "vocab_size": 50304}
    sizes |= {"qkv_tokens": 1280, "output_tokens": 1280, "ffn_tokens": 5120}
    with pytest.raises(ConversionError, match=r"\(16 in the published 900m, of this shape\)"):
        to_ours({}, sizes, None)


@pytest.mark.parametrize(
    ("preset", "keys", "parameters"),
    [
        ("150m", 123, 151_881_216),
        ("450m", 243, 454_166_528),
        ("900m", 323, 903_252_480),
        ("1.5b", 403, 1_587_219_456),
    ],
)
def test_the_published_sizes_have_the_published_keys(preset, keys, parameters):
    config = tokenformer.TokenformerConfig.from_preset(preset)
    names = ("vocab_size", "num_hidden_layers", "hidden_size")
    tokens = ("qkv_tokens", "output_tokens", "ffn_tokens")
    shapes = expected_shapes({name: getattr(config, name) for name in (*names, *tokens)})
    assert len(shapes) == keys
    assert sum(math.prod(shape) for shape in shapes.values()) == parameters


def test_old_files_views_and_several_files_are_read(tmp_path):
    state = make_state()
    expected = released_logits(state, IDS)
    # Views of one storage, as older versions of zero_to_fp32.py leave them.
    flat = torch.cat([tensor.flatten() for tensor in state.values()])
    parts = flat.split([tensor.numel() for tensor in state.values()])
    views = {name: part.view(state[name].shape) for name, part in zip(state, parts, strict=True)}
    put(tmp_path / "views", views)
    # torch's format until 1.6, which is no zip archive.
    folder = put(tmp_path / "old", {})
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    # Several files and an index, as zero_to_fp32.py writes what is above 5 GB.
    folder = put(tmp_path / "several", {})
    (folder / "pytorch_model.bin").unlink()
    homes = {name: f"pytorch_model-0000{i % 2}-of-00002.bin" for i, name in enumerate(state)}
    for file in set(homes.values()):
        torch.save({n: t for n, t in state.items() if homes[n] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": homes}))
    for kind in ("views", "old", "several"):
        model = convert(tmp_path / kind, tmp_path / f"from-{kind}").double()
        assert close(logits(model), expected), kind


EMBEDDING = "sequential.0.word_embeddings.weight"


def without(*names: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in make_state().items() if name not in names}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            without("sequential.6.norm.bias", "sequential.3.mlp.value_param_tokens"),
            r"missing: sequential.3.mlp.value_param_tokens, sequential.6.norm.bias$",
        ),
        (
            {**make_state(), "sequential.7.final_linear.weight": torch.ones(3, 3)},
            r"unknown: sequential.7.final_linear.weight$",
        ),
        (
            {**make_state(), "sequential.4.attention.key.value_param_tokens": torch.ones(24, 63)},
            r"wrong shape: sequential.4.attention.key.value_param_tokens \[24, 63\], expected "
            r"\[24, 64\]$",
        ),
        (
            {**make_state(), "sequential.6.norm.bias": torch.ones(64).half()},
            r"dtype differs from the embedding's torch.float32: sequential.6.norm.bias "
            r"torch.float16$",
        ),
        ({n: t.int() for n, t in make_state().items()}, "is torch.int32, not floating point$"),
        (without(EMBEDDING), f"missing or not matrices: {EMBEDDING}$"),
        (
            {f"module.{n}" if n == EMBEDDING else n: t for n, t in make_state().items()},
            f"missing or not matrices: {EMBEDDING}$",
        ),
        ({**make_state(), EMBEDDING: torch.ones(64)}, f"or not matrices: {EMBEDDING}$"),
        (
            {**make_state(), "sequential.999999999999.mlp.key_param_tokens": torch.ones(2, 2)},
            "unknown: sequential.999999999999.mlp.key_param_tokens$",
        ),
        ({"model.embed_tokens.weight": torch.ones(3, 4)}, "its keys are model.embed_tokens.weight"),
        (
            {f"{name}.b" if "mlp" in name else name: t for name, t in make_state().items()},
            "or not matrices: sequential.2.mlp.key_param_tokens, sequential.3.mlp.key_param",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, state, message):
    with pytest.raises(ConversionError, match=message):
        convert(put(tmp_path / "released", state), tmp_path / "ours")
    assert not any((tmp_path / "ours").iterdir())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_layers": 4}, "config.json has num_layers 4, the tensors have 3"),
        ({"ffn_slot_num": 45}, "config.json has ffn_slot_num 45, the tensors have 44"),
        (
            {"norm": "rmsnorm"},
            "config.json has norm 'rmsnorm'; only 'layernorm_nonparam' is supported",
        ),
        ({"pos_emb": "none"}, "config.json has pos_emb 'none'; only 'rotary' is supported"),
        ({"no_weight_tying": True}, "config.json has no_weight_tying True"),
        (
            {"norm_activation_type": "relu"},
            "norm_activation_type 'relu'; supported are l2_norm_gelu",
        ),
    ],
)
def test_a_config_of_another_model_is_refused(tmp_path, config, message):
    with pytest.raises(ConversionError, match=message):
        convert(put(tmp_path / "released", make_state(), CONFIG | config), tmp_path / "ours")
    assert not any((tmp_path / "ours").iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale_tokens": {"ffn": [44.0, 30.0]}}, "scale_tokens of ffn in layer 1 is 30, not 44"),
        ({"learned_scale": True}, "learned_scale is True"),
        ({"theta": "l1_gelu"}, "theta is 'l1_gelu', not one of l2_gelu, gelu_l2, softmax"),
        ({"theta_eps": 1e-5}, "theta_eps is 1e-05"),
        ({"variant": "paper"}, "variant is 'paper', not 'released'; positions is 'none'"),
        ({"positions": "learned"}, "positions is 'learned'"),
        ({"hidden_act": "gelu_tanh"}, "hidden_act is 'gelu_tanh'"),
        ({"norm": "rms_norm"}, "norm is 'rms_norm'"),
        ({"norm_parameters": "weight"}, "norm_parameters is 'weight'"),
        ({"final_norm_parameters": "weight"}, "final_norm_parameters is 'weight'"),
        ({"norm_eps": 1e-6}, "norm_eps is 1e-06"),
        ({"residual": "parallel"}, "residual is 'parallel'"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ({"ffn_tokens": [44, 50]}, r"the token counts of ffn differ: \[44, 50\]"),
        ({"k_tokens": 25}, r"the token counts of q, k, v differ: \[24, 25\]"),
    ],
    ids=str,
)
def test_what_the_released_format_cannot_hold_is_refused(tmp_path, make_model, options, message):
    make_model("tokenformer", **options).save_pretrained(tmp_path / "ours")
    with pytest.raises(ConversionError, match=message):
        back(tmp_path / "ours", tmp_path / "back")
    assert not any((tmp_path / "back").iterdir())


def test_a_grown_model_goes_back_only_with_the_scale_of_its_tokens(tmp_path, make_model):
    model = make_model("tokenformer").float()
    kept, _ = tokenformer.grow(model, ffn_tokens=60)
    kept.save_pretrained(tmp_path / "kept")
    with pytest.raises(ConversionError, match="scale_tokens of ffn in layer 0 is 44, not 60"):
        back(tmp_path / "kept", tmp_path / "none")
    current, _ = tokenformer.grow(model, ffn_tokens=60, init="random")
    current.save_pretrained(tmp_path / "current")
    back(tmp_path / "current", tmp_path / "back")
    again = convert(tmp_path / "back", tmp_path / "again")
    ids = torch.arange(30)
    assert torch.equal(logits(again, ids), logits(current, ids))
