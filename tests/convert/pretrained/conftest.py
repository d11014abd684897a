"""Small random models of every convertible architecture, and calibration data."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def build(kind: str, **options: Any) -> Any:
    import transformers

    import tokenformer

    if kind == "gpt2":
        names = {"bos_token_id": 0, "eos_token_id": 0}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SHAPE, **names, **options))
    if kind == "transformer":
        return tokenformer.TransformerForCausalLM(tokenformer.TransformerConfig(**SHAPE, **options))
    classes = {"gpt_neox": "GPTNeoX", "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2"}
    family = classes[kind]
    more = {} if kind == "gpt_neox" else {"num_key_value_heads": 2}
    config = getattr(transformers, f"{family}Config")
    return getattr(transformers, f"{family}ForCausalLM")(
        config(**{**SHAPE, **more, "intermediate_size": 48, **options})
    )


@pytest.fixture
def make_source(seed: int) -> Callable[..., Any]:
    """make_source(kind, **options): in float64 and eval mode, all weights and biases random."""

    def make(kind: str, **options: Any) -> Any:
        model = build(kind, **options).double().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                around = 1.0 if name.endswith(("norm.weight", "ln_1.weight", "ln_2.weight")) else 0
                parameter.normal_(around, 0.2)
        return model

    return make


@pytest.fixture
def batches(seed: int) -> list[torch.Tensor]:
    """Calibration data with structure: token ids [B, T + 1] that increase by 0 to 2."""
    steps = torch.randint(3, (8, 4, 49)).cumsum(-1)
    return list((steps + torch.randint(61, (8, 4, 1))) % 61)
