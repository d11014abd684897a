"""Pretrained Transformers as their parts, in one form: GPT-2, GPT-NeoX, Llama and our own twin.

An architecture says which options our configuration takes from its own, where the model keeps what,
and what cannot be had. Everything else works on `Block` and `Frame`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tokenformer.convert.pretrained.constructions import Affine

GELUS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}


@dataclass(frozen=True)
class Block:
    """The maps of one layer, each of the normed input: weights and biases of the norms are in."""

    q: Affine
    k: Affine
    v: Affine
    o: Affine
    up: Affine
    down: Affine
    gate: Affine | None = None
    """Of a gated network, down(silu(gate(y)) * up(y)); without it down(gelu(up(y)))."""


@dataclass(frozen=True)
class Frame:
    """Where a model keeps what is not in a block, and how its blocks are taken apart."""

    options: Callable[[Any], dict[str, Any]]
    """From its configuration to what ours takes over."""
    block: Callable[[Any, nn.Module, int], Block]
    """From the model, one of its layers and that layer's number."""
    layers: str
    attention_norm: str
    ffn_norm: str
    output: str
    """Within a layer: two norms and the output projection, whose inputs are the maps'."""
    final_norm: str
    positions: str | None = None

    def name(self, index: int, part: str) -> str:
        return f"{self.layers}.{index}.{part}"

    def take_apart(self, model: Any, index: int) -> Block:
        return self.block(model, model.get_submodule(f"{self.layers}.{index}"), index)


def frame_of(config: Any) -> Frame:
    if config.model_type not in FRAMES:
        raise ValueError(
            f"a {config.model_type} model cannot be converted; what can is {', '.join(FRAMES)}"
        )
    return FRAMES[config.model_type]


def affine(weight: Tensor, bias: Tensor | None) -> Affine:
    """In float64: what is folded into a weight must not cost it a digit."""
    weight = weight.detach().cpu().double()
    wide = weight.new_zeros(len(weight)) if bias is None else bias.detach().cpu().double()
    return Affine(weight, wide)


def linear(module: nn.Module) -> Affine:
    return affine(module.weight, module.bias)  # type: ignore[arg-type]


def after(norm: nn.Module, *maps: Affine) -> list[Affine]:
    parts = [getattr(norm, name, None) for name in ("weight", "bias")]
    wide = [None if part is None else part.detach().cpu().double() for part in parts]
    return [part.after(*wide) for part in maps]


def require(config: Any, name: str, *accepted: Any) -> None:
    value = getattr(config, name, accepted[0])
    if value not in accepted:
        raise ValueError(
            f"the source has {name}={value!r}; "
            f"only {' or '.join(map(repr, accepted))} can be converted"
        )


def shape_options(config: Any) -> dict[str, Any]:
    """What all of transformers' configurations call by the same names."""
    kept = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
        "max_position_embeddings", "tie_word_embeddings", "initializer_range",
        "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    return {name: getattr(config, name) for name in kept}


def rotary_options(config: Any) -> dict[str, Any]:
    rotation = config.rope_parameters
    kind = rotation.get("rope_type", "default")
    if kind != "default":
        raise ValueError(
            f"the source has rotary positions of the type {kind!r}; only 'default' can be converted"
        )
    return {
        "positions": "rotary",
        "rotary_base": float(rotation["rope_theta"]),
        "rotary_fraction": float(rotation.get("partial_rotary_factor", 1.0)),
    }


def gpt2_options(config: Any) -> dict[str, Any]:
    require(config, "activation_function", *GELUS)
    require(config, "add_cross_attention", False)
    require(config, "scale_attn_weights", True)
    return {
        **shape_options(config),
        "positions": "learned",
        "norm_eps": config.layer_norm_epsilon,
        "hidden_act": GELUS[config.activation_function],
    }


def gpt2_block(model: Any, layer: Any, index: int) -> Block:
    # GPT-2 keeps its matrices with the inputs first.
    q, k, v = (
        affine(weight.T, bias)
        for weight, bias in zip(
            layer.attn.c_attn.weight.chunk(3, dim=1),
            layer.attn.c_attn.bias.chunk(3),
            strict=True,
        )
    )
    if model.config.scale_attn_by_inverse_layer_idx:
        q = Affine(q.weight / (index + 1), q.bias / (index + 1))
    o, up, down = (
        affine(module.weight.T, module.bias)
        for module in (layer.attn.c_proj, layer.mlp.c_fc, layer.mlp.c_proj)
    )
    q, k, v = after(layer.ln_1, q, k, v)
    (up,) = after(layer.ln_2, up)
    return Block(q, k, v, o, up, down)


def neox_options(config: Any) -> dict[str, Any]:
    require(config, "hidden_act", *GELUS)
    return {
        **shape_options(config),
        **rotary_options(config),
        "norm_eps": config.layer_norm_eps,
        "residual": "parallel" if config.use_parallel_residual else "sequential",
        "hidden_act": GELUS[config.hidden_act],
    }


def neox_block(model: Any, layer: Any, index: int) -> Block:
    whole = linear(layer.attention.query_key_value)
    heads = (model.config.num_attention_heads, 3, -1)  # each head has its q, k and v together
    q, k, v = (
        Affine(weight.flatten(0, 1), bias.flatten())
        for weight, bias in zip(
            whole.weight.unflatten(0, heads).unbind(1),
            whole.bias.unflatten(0, heads).unbind(1),
            strict=True,
        )
    )
    q, k, v = after(layer.input_layernorm, q, k, v)
    (up,) = after(layer.post_attention_layernorm, linear(layer.mlp.dense_h_to_4h))
    return Block(q, k, v, linear(layer.attention.dense), up, linear(layer.mlp.dense_4h_to_h))


def llama_options(config: Any) -> dict[str, Any]:
    require(config, "hidden_act", "silu")
    require(config, "head_dim", config.hidden_size // config.num_attention_heads, None)
    window = getattr(config, "sliding_window", None)
    if window is not None and window < config.max_position_embeddings:
        raise ValueError(
            f"the source attends through a window of {window} positions; only attention to all "
            f"{config.max_position_embeddings} can be converted"
        )
    return {
        **shape_options(config),
        **rotary_options(config),
        "num_key_value_heads": config.num_key_value_heads,
        "norm": "rms_norm",
        "norm_eps": config.rms_norm_eps,
        "final_norm_parameters": "weight",
    }


def llama_block(model: Any, layer: Any, index: int) -> Block:
    attention, mlp = layer.self_attn, layer.mlp
    q, k, v = after(
        layer.input_layernorm,
        *map(linear, (attention.q_proj, attention.k_proj, attention.v_proj)),
    )
    up, gate = after(layer.post_attention_layernorm, linear(mlp.up_proj), linear(mlp.gate_proj))
    return Block(q, k, v, linear(attention.o_proj), up, linear(mlp.down_proj), gate)


def twin_options(config: Any) -> dict[str, Any]:
    kept = (
        "num_key_value_heads", "positions", "rotary_fraction", "rotary_base", "norm", "norm_eps",
        "final_norm_parameters", "residual", "hidden_act",
    )  # fmt: skip
    return shape_options(config) | {name: getattr(config, name) for name in kept}


def twin_block(model: Any, layer: Any, index: int) -> Block:
    attention, ffn = layer.attention, layer.ffn
    q, k, v = after(layer.attention_norm, *map(linear, (attention.q, attention.k, attention.v)))
    inner = (ffn.up, ffn.gate) if model.config.mlp == "swiglu" else (ffn.up,)
    up, *gate = after(layer.ffn_norm, *map(linear, inner))
    return Block(q, k, v, linear(attention.o), up, linear(ffn.down), *gate)


LLAMA = Frame(
    llama_options,
    llama_block,
    layers="model.layers",
    attention_norm="input_layernorm",
    ffn_norm="post_attention_layernorm",
    output="self_attn.o_proj",
    final_norm="model.norm",
)
FRAMES = {
    "gpt2": Frame(
        gpt2_options,
        gpt2_block,
        layers="transformer.h",
        attention_norm="ln_1",
        ffn_norm="ln_2",
        output="attn.c_proj",
        final_norm="transformer.ln_f",
        positions="transformer.wpe",
    ),
    "gpt_neox": Frame(
        neox_options,
        neox_block,
        layers="gpt_neox.layers",
        attention_norm="input_layernorm",
        ffn_norm="post_attention_layernorm",
        output="attention.dense",
        final_norm="gpt_neox.final_layer_norm",
    ),
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "tokenformer_transformer": Frame(
        twin_options,
        twin_block,
        layers="model.layers",
        attention_norm="attention_norm",
        ffn_norm="ffn_norm",
        output="attention.o",
        final_norm="model.norm",
        positions="model.positions",
    ),
}


@torch.no_grad()
def outer_tensors(model: Any, frame: Frame) -> dict[str, Tensor]:
    """What is outside the blocks, under our names."""
    norm = model.get_submodule(frame.final_norm)
    tensors = {f"model.norm.{name}": tensor for name, tensor in norm.named_parameters()}
    tensors["model.embed_tokens.weight"] = model.get_input_embeddings().weight
    if not model.config.tie_word_embeddings:
        tensors["lm_head.weight"] = model.get_output_embeddings().weight
    if frame.positions is not None:
        table = getattr(model.get_submodule(frame.positions), "weight", None)
        if table is not None:
            tensors["model.positions.weight"] = table
    return tensors
