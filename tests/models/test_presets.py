"""Every published size, to the last parameter; built on the meta device, so it costs no memory."""

import pytest
import torch

from tokenformer import (
    TokenformerConfig,
    TokenformerForCausalLM,
    TransformerConfig,
    TransformerForCausalLM,
)

# name: layers, width, heads, attention tokens, ffn tokens, parameters. The growth sizes are
# published without the final norm's 2 d.
TOKENFORMERS = {
    "150m": (12, 768, 12, 768, 3072, 151_881_216),
    "450m": (24, 1024, 16, 1024, 4096, 454_166_528),
    "900m": (32, 1280, 16, 1280, 5120, 903_252_480),
    "1.5b": (40, 1536, 16, 1536, 6144, 1_587_219_456),
    "124m": (12, 768, 12, 576, 2304, 123_568_128 + 1536),
    "354m": (12, 768, 12, 2140, 8560, 354_189_312 + 1536),
    "757m": (12, 768, 12, 4850, 19400, 753_795_072 + 1536),
    "1.4b": (12, 768, 12, 8620, 34480, 1_309_704_192 + 1536),
    # 24 layers of (4 * 768 + 3072) pairs of tokens of 1024, the embedding and the norm; then grown.
    "owt2-354m": (24, 1024, 16, 768, 3072, 301_989_888 + 51_511_296 + 2048),
    "owt2-757m": (24, 1024, 16, 1792, 7168, 704_643_072 + 51_511_296 + 2048),
}
# name: width, heads, parameters.
TRANSFORMERS = {
    "124m": (768, 12, 123_569_664),
    "354m": (1408, 22, 356_305_664),
    "757m": (2112, 33, 748_564_608),
    "1.4b": (2944, 46, 1_396_168_448),
}


def distinct_parameters(model: torch.nn.Module) -> int:
    """Counted by name, a tied head once."""
    distinct = {id(parameter): parameter for parameter in model.parameters()}
    return sum(parameter.numel() for parameter in distinct.values())


@pytest.mark.parametrize("name", TOKENFORMERS)
def test_tokenformer_preset(name: str) -> None:
    layers, width, heads, attention, ffn, parameters = TOKENFORMERS[name]
    config = TokenformerConfig.from_preset(name)
    assert (config.num_hidden_layers, config.hidden_size) == (layers, width)
    assert (config.num_attention_heads, config.num_key_value_heads) == (heads, heads)
    assert (config.vocab_size, config.variant) == (50304, "released")
    with torch.device("meta"):
        model = TokenformerForCausalLM(config)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    block = model.model.layers[layers - 1]
    for projection in (block.attention.q, block.attention.k, block.attention.v, block.attention.o):
        assert projection.key_tokens.shape == projection.value_tokens.shape == (attention, width)
    assert block.ffn.key_tokens.shape == block.ffn.value_tokens.shape == (ffn, width)
    assert distinct_parameters(model) == model.num_parameters() == parameters


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformer_preset(name: str) -> None:
    width, heads, parameters = TRANSFORMERS[name]
    config = TransformerConfig.from_preset(name)
    assert (config.num_hidden_layers, config.hidden_size, config.head_dim) == (12, width, 64)
    assert config.num_attention_heads == heads
    with torch.device("meta"):
        model = TransformerForCausalLM(config)
    assert distinct_parameters(model) == model.num_parameters() == parameters


def test_every_preset_is_tested() -> None:
    assert set(TokenformerConfig.presets) == set(TOKENFORMERS)
    assert set(TransformerConfig.presets) == set(TRANSFORMERS)


def test_options_of_a_preset_can_be_changed_without_changing_the_preset() -> None:
    changed = TokenformerConfig.from_preset("124M", num_hidden_layers=2, positions="learned")
    assert (changed.num_hidden_layers, changed.positions, changed.qkv_tokens) == (2, "learned", 576)
    assert TokenformerConfig.from_preset("124m").num_hidden_layers == 12


def test_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'125m'.*124m, 354m, 757m, 1\.4b, 150m") as caught:
        TokenformerConfig.from_preset("125m")
    assert "owt2-757m" in str(caught.value)
    # A size of one family is not silently taken for the other's.
    with pytest.raises(ValueError, match=r"'150m'.*124m, 354m, 757m, 1\.4b"):
        TransformerConfig.from_preset("150m")


@pytest.mark.parametrize("name", ["124m", "354m", "757m", "1.4b"])
def test_a_swiglu_baseline_has_about_the_same_parameters(name: str) -> None:
    """Exactly as many where 8 d / 3 is a multiple of 64, as for 768 and 2112; else a few more."""
    counts = []
    for mlp in ("gelu", "swiglu"):
        with torch.device("meta"):
            config = TransformerConfig.from_preset(name, mlp=mlp)
            counts.append(TransformerForCausalLM(config).num_parameters())
    assert counts[1] == counts[0] if name in ("124m", "757m") else counts[1] > counts[0]
    assert counts[1] < 1.005 * counts[0]
