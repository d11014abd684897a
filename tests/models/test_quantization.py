"""Int8 and 4-bit weights: outputs, saving and loading, refusals."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForImageClassification

import tokenformer
from tests.support.decoding import record_native_decoding
from tokenformer.layers import Pattention
from tokenformer.layers.int4 import Int4Pattention
from tokenformer.layers.int8 import Int8Pattention, dequantize, quantize
from tokenformer.models.loading import load_for_training
from tokenformer.ops.backends.native.library import library

Make = Callable[..., Any]
INT8, INT4 = tokenformer.TokenQuantization(), tokenformer.TokenQuantization(bits=4)
both = pytest.mark.parametrize("config", [INT8, INT4], ids=["int8", "int4"])


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, make_model: Make, tmp_path: Path) -> Path:
    make_model("tokenformer", tie_word_embeddings=request.param).float().save_pretrained(tmp_path)
    return tmp_path


def prompt(length: int = 20) -> torch.Tensor:
    return torch.randint(1, 61, (1, length), generator=torch.Generator().manual_seed(1))


def test_rounding_error_is_at_most_half_a_step():
    matrix = torch.randn(40, 30) * torch.logspace(-6, 6, 40)[:, None]
    matrix[7] = 0
    numbers, scales = quantize(matrix)
    assert numbers.dtype == torch.int8
    assert numbers.abs().amax(1).tolist() == [0 if row == 7 else 127 for row in range(40)]
    error = (dequantize(numbers, scales, torch.float32) - matrix).abs()
    assert (error <= 0.5001 * scales[:, None]).all()


@pytest.mark.parametrize("kind", [Int8Pattention, Int4Pattention])
@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_layer_matches_its_dequantized_tokens(kind, rows, dtype):
    """Few rows are rounded; many rows, and gradients of x, dequantize first."""
    torch.manual_seed(0)
    layer = Pattention(24, 16, 50, theta="gelu_l2", eps=1e-3, scale_tokens=33.0).to(dtype)
    small = kind(layer)
    same = Pattention(24, 16, 50, theta="gelu_l2", eps=1e-3, scale_tokens=33.0, dtype=torch.float64)
    with torch.no_grad():
        keys, values = small.dequantized(torch.float64)
        same.key_tokens.copy_(keys)
        same.value_tokens.copy_(values)
        x = torch.randn(rows, 24, dtype=dtype)
        is_coarse = dtype == torch.bfloat16 or kind is Int4Pattention
        close = {"rtol": 0, "atol": 0.05 if is_coarse else 1e-3}
        torch.testing.assert_close(small(x).double(), same(x.double()), **close)
    x.requires_grad_()
    wide = x.detach().double().requires_grad_()
    small(x).sum().backward()
    same(wide).sum().backward()
    close = {"rtol": 0, "atol": 0.1 if dtype == torch.bfloat16 else 1e-5}
    torch.testing.assert_close(x.grad.double(), wide.grad, **close)


@both
def test_a_model_is_quantized_on_loading_and_saved(folder, config, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    small = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    ids = prompt()
    with torch.no_grad():
        wanted, found = model(ids).logits, small(ids).logits
    # For these large random weights; docs/results/performance.md has a trained model.
    assert 1e-4 < (found - wanted).norm() / wanted.norm() < (0.05 if config is INT8 else 0.7)
    if config is INT8:  # such narrow layers have 8 times their width in 4 bits
        assert bytes_of(small) < 0.3 * bytes_of(model)
    small.save_pretrained(tmp_path / "small")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    with torch.no_grad():
        assert torch.equal(again(ids).logits, found)
    with safe_open(tmp_path / "small" / "model.safetensors", framework="pt") as file:
        tied = model.config.tie_word_embeddings
        assert ("lm_head.weight" in file.keys()) == ("lm_head.scales" in file.keys()) == (not tied)  # noqa: SIM118
    again.save_pretrained(tmp_path / "again")
    files = [tmp_path / name / "model.safetensors" for name in ("small", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()


def bytes_of(model: Any) -> int:
    return sum({p.data_ptr(): p.numel() * p.itemsize for p in model.parameters()}.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["quantized", "kept", "cast"])
@both
def test_decoding_matches_a_full_forward(folder, config, dtype, way, tmp_path, monkeypatch):
    """Quantized on loading, loaded from a quantized folder, and cast afterwards."""
    first = torch.float32 if way == "cast" else dtype
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=first)
    if way == "kept":
        model.save_pretrained(tmp_path / "small")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=dtype)
    elif way == "cast":
        model.to(dtype)
    assert model.lm_head.scales.dtype == torch.float32
    ffn = model.model.layers[0].ffn
    assert ffn.key_scales.dtype == (torch.float32 if config is INT8 else torch.bfloat16)
    native = record_native_decoding(monkeypatch)
    bounds = {"max_new_tokens": 30, "min_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    output = model.generate(prompt(), output_logits=True, return_dict_in_generate=True, **bounds)
    with torch.no_grad():
        wanted = model(output.sequences, use_cache=False).logits[0, 19:-1].float()
    assert native == [False] + (29 * [library() is not None]) + [False]
    share = 0.1 if config is INT4 else 0.03 if dtype == torch.bfloat16 else 1e-3
    assert (torch.cat(output.logits) - wanted).abs().max() < share * wanted.abs().max()


@both
def test_batches_and_beams(folder, config):
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    ids = torch.cat([prompt(), prompt() % 60 + 1])
    bounds = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    alone = [model.generate(ids[row : row + 1], num_beams=2, **bounds) for row in range(2)]
    assert torch.equal(model.generate(ids, num_beams=2, **bounds), torch.cat(alone))


def test_images(tmp_path):
    config = tokenformer.TokenformerVisionConfig(
        image_size=8, patch_size=4, num_channels=1, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=4, qkv_tokens=24, output_tokens=20, ffn_tokens=44, num_labels=3,
    )  # fmt: skip
    torch.manual_seed(0)
    model = tokenformer.TokenformerForImageClassification(config).eval()
    model.save_pretrained(tmp_path)
    small = AutoModelForImageClassification.from_pretrained(tmp_path, quantization_config=INT8)
    assert any(isinstance(module, Int8Pattention) for module in small.modules())
    images = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(small(images).logits, model(images).logits, rtol=0.05, atol=0.02)


def test_unsupported_uses_are_refused(make_model, folder, tmp_path):
    with pytest.raises(ValueError, match="bits=3 is not supported; only 4 and 8 are"):
        tokenformer.TokenQuantization(bits=3)
    make_model("transformer").float().save_pretrained(tmp_path / "transformer")
    with pytest.raises(ValueError, match="has no tokens"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "transformer", quantization_config=INT8)
    learned = make_model("tokenformer", learned_scale=True).float()
    learned.save_pretrained(tmp_path / "learned")
    with pytest.raises(ValueError, match="a fixed scale_tokens"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "learned", quantization_config=INT8)
    small = AutoModelForCausalLM.from_pretrained(folder, quantization_config=INT8)
    refusal = re.escape("quantized; use the model it was quantized from")
    with pytest.raises(ValueError, match=refusal):
        tokenformer.grow(small, ffn_tokens=100)
    with pytest.raises(ValueError, match=refusal):
        tokenformer.merge(small, small)
    with pytest.raises(ValueError, match=refusal):
        tokenformer.take_prefix(small, 0.5)
    with pytest.raises(ValueError, match=refusal):
        tokenformer.set_active_share(small, 0.5)
    small.save_pretrained(tmp_path / "small")
    with pytest.raises(ValueError, match="is quantized; train"):
        load_for_training(tokenformer.TokenformerForCausalLM, str(tmp_path / "small"))
