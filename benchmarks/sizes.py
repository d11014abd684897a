"""The published sizes, and two tiny ones with which a benchmark is tried out in seconds."""

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
HEAD = 8


def config_of(family: str, size: str) -> Any:
    """`family` is Tokenformer or Transformer."""
    made = getattr(tokenformer, f"{family}Config")
    if size not in TINY[family]:
        return made.from_preset(size)
    shape = TINY[family][size]
    return made(**SHARED, **shape, num_attention_heads=shape["hidden_size"] // HEAD)


def model_class(family: str) -> Any:
    return getattr(tokenformer, f"{family}ForCausalLM")
