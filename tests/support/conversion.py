"""A checkpoint in the released layout, and the forward pass of the released model.

The forward pass is written in plain torch from the paper and the layout, and shares no code with
the package.
"""

import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCABULARY, WIDTH, LAYERS, HEADS = 61, 64, 3, 4  # 16 channels a head, of which 4 rotate
TOKENS = {"query": 24, "key": 24, "value": 24, "proj": 20}
FFN_TOKENS = 44
CONFIG: dict[str, Any] = {
    "architectures": ["TokenFormerForCausalLM"],
    "num_layers": LAYERS,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "qkv_slot_num": 24,
    "proj_slot_num": 20,
    "ffn_slot_num": FFN_TOKENS,
    "seq_length": 128,
    "max_position_embeddings": 128,
    "pos_emb": "rotary",
    "rotary_pct": 0.25,
    "no_weight_tying": False,
    "norm": "layernorm_nonparam",
    "final_norm": "layernorm",
    "gpt_j_residual": False,
    "attention_config": [[["tokenformer"], LAYERS]],
    "norm_activation_type": "l2_norm_gelu",
    "torch_dtype": "float16",  # as on the hub, where the tensors are float32
}


def make_state(
    dtype: torch.dtype = torch.float32, vocabulary: int = VOCABULARY, width: int = WIDTH
) -> dict[str, Tensor]:
    """Return weights that are large enough for every part to change the logits."""
    torch.manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape).mul(0.5).to(dtype)

    state = {"sequential.0.word_embeddings.weight": normal(vocabulary, width)}
    for layer in range(LAYERS):
        for part, count in TOKENS.items():
            for half in ("key", "value"):
                name = f"sequential.{2 + layer}.attention.{part}.{half}_param_tokens"
                state[name] = normal(count, width)
        for half in ("key", "value"):
            state[f"sequential.{2 + layer}.mlp.{half}_param_tokens"] = normal(FFN_TOKENS, width)
    for half in ("weight", "bias"):
        state[f"sequential.{LAYERS + 3}.norm.{half}"] = normal(width)
    return state


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def weigh(scores: Tensor, activation: str) -> Tensor:
    count = scores.shape[-1]
    if activation == "l2_norm_gelu":
        return gelu(scores * math.sqrt(count) / scores.square().sum(-1, keepdim=True).sqrt())
    if activation == "gelu_l2_norm":
        active = gelu(scores)
        return active * math.sqrt(count) / active.square().sum(-1, keepdim=True).sqrt()
    return scores.exp() * count / scores.exp().sum(-1, keepdim=True)


def normalise(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def rotate(x: Tensor, fraction: float, base: float) -> Tensor:
    """Rotate the first channels of each head, pairing channel i with i + half as complex numbers.
    The angles are float32. [H, T, D]"""
    turning = int(x.shape[-1] * fraction)
    half = turning // 2
    speeds = base ** (-torch.arange(half) * 2 / turning)
    angles = torch.arange(x.shape[1])[:, None] * speeds  # [T, half]
    turns = torch.complex(angles.cos().double(), angles.sin().double())
    turned = torch.complex(x[..., :half], x[..., half:turning]) * turns
    return torch.cat([turned.real, turned.imag, x[..., turning:]], dim=-1)


def released_logits(
    state: dict[str, Tensor],
    ids: Tensor,
    *,
    heads: int = HEADS,
    fraction: float = 0.25,
    base: float = 10000.0,
    activation: str = "l2_norm_gelu",
) -> Tensor:
    """Return the logits of one sequence. [T] -> [T, vocabulary]"""
    state = {name: tensor.double() for name, tensor in state.items()}
    embedding = state["sequential.0.word_embeddings.weight"]
    x = embedding[ids]
    length = len(ids)
    mask = torch.full((length, length), -math.inf, dtype=x.dtype).triu(1)

    def attend_to_tokens(rows: Tensor, name: str) -> Tensor:
        weights = weigh(rows @ state[f"{name}.key_param_tokens"].T, activation)
        return weights @ state[f"{name}.value_param_tokens"]

    def split(rows: Tensor) -> Tensor:
        return rows.view(length, heads, -1).transpose(0, 1)  # [H, T, D]

    for layer in range(2, 2 + LAYERS):
        normed = normalise(x)
        q, k, v = (
            split(attend_to_tokens(normed, f"sequential.{layer}.attention.{part}"))
            for part in ("query", "key", "value")
        )
        q, k = rotate(q, fraction, base), rotate(k, fraction, base)
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]) + mask
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1)
        x = x + attend_to_tokens(mixed, f"sequential.{layer}.attention.proj")
        x = x + attend_to_tokens(normalise(x), f"sequential.{layer}.mlp")
    last = f"sequential.{LAYERS + 3}.norm"
    x = normalise(x) * state[f"{last}.weight"] + state[f"{last}.bias"]
    return x @ embedding.T


class CodeOnUnpickle:
    """Creates a symbolic link at `path` when it is unpickled without `weights_only`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return os.symlink, ("nowhere", str(self.path))
