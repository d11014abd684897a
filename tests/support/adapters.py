"""A small base, and adapters with random weights, as if they had been trained."""

from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model

from tokenformer import TokenAdapterConfig, TokenformerConfig, TokenformerForCausalLM


def make_base(seed: int = 0, **options: Any) -> TokenformerForCausalLM:
    """A small model that adapters can be attached to."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"qkv_tokens": 12, "output_tokens": 12, "ffn_tokens": 24}
    config = TokenformerConfig(**(sizes | tokens | options))
    return TokenformerForCausalLM(config).eval()


def make_adapter(
    base: Any,
    folder: Path,
    seed: int = 0,
    targets: Any = ("ffn",),
    config: Any = None,
    std: float = 0.5,
    **options: Any,
) -> Path:
    """Save an adapter of a model, by default of five tokens, and return its folder."""
    if config is None:
        options = {"num_tokens": 5, "target_modules": list(targets), **options}
        config = TokenAdapterConfig(**options)
    model = get_peft_model(base, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "token_adapter" in name or "lora" in name:
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return folder
