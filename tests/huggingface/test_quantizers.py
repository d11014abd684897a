"""Quantizers that replace `nn.Linear`: refused where weights are parameter tokens."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

import tokenformer
from tokenformer.errors import TokenformerError

Make = Callable[..., Any]
REFUSAL = r"'{}' does not quantize parameter tokens; use .*tokenformer\.TokenQuantization\(\)"


def test_foreign_quantizers_are_refused(make_model: Make, tmp_path: Path) -> None:
    """Before the quantizer's package is looked for, and also where config.json names it."""
    make_model("tokenformer").float().save_pretrained(tmp_path)
    with pytest.raises(TokenformerError, match=REFUSAL.format("bitsandbytes")):
        AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=BitsAndBytesConfig(load_in_8bit=True)
        )
    file = tmp_path / "config.json"
    plain = file.read_text()
    file.write_text(
        json.dumps({**json.loads(plain), "quantization_config": {"quant_method": "gptq"}})
    )
    with pytest.raises(ValueError, match=REFUSAL.format("gptq")):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    file.write_text(plain)
    rounded = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=tokenformer.TokenQuantization()
    )
    rounded.save_pretrained(tmp_path / "rounded")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "rounded").is_quantized


def test_torchao(make_model: Make, family: str, tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    model = make_model(family).float()
    model.save_pretrained(tmp_path)
    if family == "tokenformer":
        with pytest.raises(ValueError, match=REFUSAL.format("torchao")):
            AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
        return
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert type(rounded.model.layers[0].attention.q.weight) is not torch.nn.Parameter
    ids = torch.arange(9)[None]
    with torch.no_grad():
        torch.testing.assert_close(rounded(ids).logits, model(ids).logits, rtol=0.2, atol=0.5)
