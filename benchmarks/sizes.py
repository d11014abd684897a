"""The published sizes, and two tiny ones for tests."""

from typing import Any

import tokenformer

SHARED = {"vocab_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 64}
TINY: dict[str, dict[str, dict[str, int]]] = {
    "Tokenformer": {
        "tiny": {"hidden_size": 32, "qkv_tokens": 24, "output_tokens": 24, "ffn_tokens": 40},
        "tiny-grown": {"hidden_size": 32, "qkv_tokens": 32, "output_tokens": 32, "ffn_tokens": 64},
    },
    "Transformer": {
        "tiny": {"hidden_size": 32, "intermediate_size": 128},
        "tiny-grown": {"hidden_size": 48, "intermediate_size": 192},
    },
}
HEAD_DIM = 8


def config_of(family: str, size: str) -> Any:
    """Return the configuration of a size; `family` is Tokenformer or Transformer."""
    config_class = getattr(tokenformer, f"{family}Config")
    if size not in TINY[family]:
        return config_class.from_preset(size)
    shape = TINY[family][size]
    return config_class(**SHARED, **shape, num_attention_heads=shape["hidden_size"] // HEAD_DIM)


def model_class(family: str) -> Any:
    return getattr(tokenformer, f"{family}ForCausalLM")
