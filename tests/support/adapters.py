"""Adapters with random weights, as if they had been trained, in folders."""

from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model

from tokenformer import TokenAdapterConfig


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
