"""Initial weights have the published statistics, on any device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tokenformer import (
    TokenformerConfig,
    TokenformerForCausalLM,
    TransformerConfig,
    TransformerForCausalLM,
)

Make = Callable[..., Any]

# Wide enough that a sample's standard deviation is within 4 % of the true one, and with sizes that
# tell 0.02, 1/sqrt(d), 1/sqrt(n) and 2/(L sqrt(d)) apart.
SHAPE: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "norm_parameters": "weight_bias",
}
RESIDUAL_STD = 2 / (3 * 64**0.5)


def tokenformer(**options: Any) -> Any:
    tokens = {"qkv_tokens": 100, "output_tokens": 130, "ffn_tokens": 170}
    return TokenformerForCausalLM(TokenformerConfig(**{**SHAPE, **tokens, **options}))


def transformer(**options: Any) -> Any:
    size = {"intermediate_size": 100}
    return TransformerForCausalLM(TransformerConfig(**{**SHAPE, **size, **options}))


CASES = {
    "tokenformer, released": (
        lambda: tokenformer(),
        {"embed_tokens.weight": 0.02, "key_tokens": 0.02, "value_tokens": RESIDUAL_STD},
    ),
    "tokenformer, released, another range": (
        lambda: tokenformer(initializer_range=0.3, tie_word_embeddings=False),
        {
            "embed_tokens.weight": 0.3,
            "lm_head.weight": 0.3,
            "key_tokens": 0.3,
            "value_tokens": RESIDUAL_STD,
        },
    ),
    "tokenformer, paper": (
        lambda: tokenformer(variant="paper"),
        {
            "embed_tokens.weight": 0.02,
            "key_tokens": 64**-0.5,
            "ffn.value_tokens": 170**-0.5,
            "o.value_tokens": 130**-0.5,
            "value_tokens": 100**-0.5,
        },
    ),
    "tokenformer, learned positions, grouped queries": (
        lambda: tokenformer(positions="learned", num_key_value_heads=2),
        {
            "embed_tokens.weight": 0.02,
            "positions.weight": 0.02,
            "key_tokens": 0.02,
            "value_tokens": RESIDUAL_STD,
        },
    ),
    "transformer, released": (
        lambda: transformer(),
        {
            "embed_tokens.weight": 0.02,
            "o.weight": RESIDUAL_STD,
            "down.weight": RESIDUAL_STD,
            "weight": 0.02,
        },
    ),
    "transformer, swiglu": (
        lambda: transformer(mlp="swiglu"),
        {
            "embed_tokens.weight": 0.02,
            "o.weight": RESIDUAL_STD,
            "down.weight": RESIDUAL_STD,
            "weight": 0.02,
        },
    ),
    "transformer, paper": (
        lambda: transformer(variant="paper"),
        {"embed_tokens.weight": 0.02, "down.weight": 100**-0.5, "weight": 64**-0.5},
    ),
}


def check_statistics(model: nn.Module, stds: dict[str, float]) -> None:
    """Each parameter against the first name in `stds` that ends its own."""
    for name, parameter in model.named_parameters():
        value = parameter.detach().float()
        assert value.isfinite().all(), name
        if "norm." in name:
            assert (value == (1.0 if name.endswith("weight") else 0.0)).all(), name
            continue
        std = next(std for ending, std in stds.items() if name.endswith(ending))
        assert value.std().item() == pytest.approx(std, rel=0.05), name
        assert abs(value.mean().item()) < 5 * std / value.numel() ** 0.5, name
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == model.config.tie_word_embeddings


@pytest.mark.parametrize("case", CASES)
def test_statistics_of_a_new_model(seed: int, case: str) -> None:
    make, stds = CASES[case]
    check_statistics(make(), stds)


@pytest.mark.parametrize("case", CASES)
def test_a_model_from_the_meta_device_is_initialized_alike(seed: int, case: str) -> None:
    make, stds = CASES[case]
    with torch.device("meta"):
        model = make()
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert not list(model.buffers()), "a buffer would come from the meta device as garbage"
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    model.init_weights()
    check_statistics(model, stds)
    ids = torch.randint(301, (2, 5))
    assert model(ids, labels=ids).loss.isfinite()


def test_the_seed_decides() -> None:
    def draw(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return dict(tokenformer().state_dict())

    first, second, other = draw(1), draw(1), draw(2)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_every_parameter_of_a_new_model_learns(make_config: Make, family: str, seed: int) -> None:
    """At initialization every row of every parameter has a gradient."""
    classes = {"tokenformer": TokenformerForCausalLM, "transformer": TransformerForCausalLM}
    for variant in ("released", "paper"):
        model = classes[family](make_config(family, variant=variant))
        ids = torch.randint(61, (4, 32))
        model(ids, labels=ids).loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad.isfinite().all(), name
            if not name.endswith("embed_tokens.weight"):
                assert (parameter.grad != 0).all(), name


@pytest.mark.parametrize(
    ("case", "missing"),
    [
        ("tokenformer, released", "model.layers.1.ffn.value_tokens"),
        ("tokenformer, released", "model.layers.2.attention.k.key_tokens"),
        ("tokenformer, paper", "model.layers.0.attention.o.value_tokens"),
        ("transformer, released", "model.layers.1.attention.o.weight"),
        ("transformer, released", "model.layers.1.ffn.down.weight"),
        ("transformer, released", "model.layers.0.ffn_norm.weight"),
        ("tokenformer, released", "model.norm.bias"),
        ("tokenformer, learned positions, grouped queries", "model.positions.weight"),
        ("tokenformer, released", "model.embed_tokens.weight"),
    ],
)
def test_a_tensor_missing_from_a_checkpoint_is_initialized(
    seed: int, tmp_path: Path, case: str, missing: str
) -> None:
    make, stds = CASES[case]
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors[missing]
    save_file(tensors, file, metadata={"format": "pt"})
    loaded, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert missing in report["missing_keys"]
    for name, parameter in loaded.named_parameters():
        if name != missing:
            assert (parameter == 7.0).all(), name
            continue
        assert parameter.isfinite().all()
        if "norm." in name:
            assert (parameter == (1.0 if name.endswith("weight") else 0.0)).all()
        else:
            std = next(std for ending, std in stds.items() if name.endswith(ending))
            assert parameter.std().item() == pytest.approx(std, rel=0.05)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
