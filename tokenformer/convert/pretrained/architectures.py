"""Reading the weights of pretrained Transformers: GPT-2, GPT-NeoX, Llama and our own baseline.

An `Architecture` maps the source's configuration to ours, names its modules, and reads each layer
as a `Block`, the same form for all. Options that cannot be converted are refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from tokenformer.convert.pretrained.token_construction import Affine

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
    """The projections of one layer. Weights and biases of the norms are folded into them."""

    q: Affine
    k: Affine
    v: Affine
    o: Affine
    up: Affine
    down: Affine
    gate: Affine | None = None
    """With a gate the MLP is down(silu(gate(y)) * up(y)), without it down(gelu(up(y)))."""


@dataclass(frozen=True)
class Architecture:
    """Names of a model's modules, and functions that read its configuration and layers."""

    options: Callable[[Any], dict[str, Any]]
    """Configuration -> options of our configuration."""
    block: Callable[[PreTrainedModel, nn.Module, int], Block]
    """(model, layer, layer number) -> its projections."""
    layers: str
    attention_norm: str
    ffn_norm: str
    output: str
    """Module names within a layer: two norms and the output projection."""
    final_norm: str
    positions: str | None = None

    def name(self, index: int, part: str) -> str:
        return f"{self.layers}.{index}.{part}"

    def read_block(self, model: PreTrainedModel, index: int) -> Block:
        return self.block(model, model.get_submodule(f"{self.layers}.{index}"), index)


def find_architecture(config: Any) -> Architecture:
    if config.model_type not in ARCHITECTURES:
        raise ValueError(
            f"a {config.model_type} model cannot be converted; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[config.model_type]


def affine(weight: Tensor, bias: Tensor | None) -> Affine:
    """Return the projection in float64, so that folding norms into it loses no precision."""
    weight = weight.detach().cpu().double()
    wide = weight.new_zeros(len(weight)) if bias is None else bias.detach().cpu().double()
    return Affine(weight, wide)


def linear(module: nn.Module) -> Affine:
    return affine(module.weight, module.bias)  # type: ignore[arg-type]


def fold_norm(norm: nn.Module, *projections: Affine) -> list[Affine]:
    """Fold the weight and bias of a norm into the projections that read its output."""
    parts = [getattr(norm, name, None) for name in ("weight", "bias")]
    wide = [None if part is None else part.detach().cpu().double() for part in parts]
    return [projection.fold(*wide) for projection in projections]


def require(config: Any, name: str, *accepted: Any) -> None:
    value = getattr(config, name, accepted[0])
    if value not in accepted:
        raise ValueError(
            f"the source has {name}={value!r}; "
            f"only {' or '.join(map(repr, accepted))} can be converted"
        )


def shape_options(config: Any) -> dict[str, Any]:
    """Return the options with the same name in all configurations of transformers."""
    names = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
        "max_position_embeddings", "tie_word_embeddings", "initializer_range",
        "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    return {name: getattr(config, name) for name in names}


def rotary_options(config: Any) -> dict[str, Any]:
    rotation = config.rope_parameters
    kind = rotation.get("rope_type", "default")
    if kind != "default":
        raise ValueError(
            f"the source has rotary positions of type {kind!r}; only 'default' can be converted"
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


def gpt2_block(model: PreTrainedModel, layer: Any, index: int) -> Block:
    # GPT-2 stores its matrices as [in, out].
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
    q, k, v = fold_norm(layer.ln_1, q, k, v)
    (up,) = fold_norm(layer.ln_2, up)
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


def neox_block(model: PreTrainedModel, layer: Any, index: int) -> Block:
    whole = linear(layer.attention.query_key_value)
    heads = (model.config.num_attention_heads, 3, -1)  # each head stores its q, k and v together
    q, k, v = (
        Affine(weight.flatten(0, 1), bias.flatten())
        for weight, bias in zip(
            whole.weight.unflatten(0, heads).unbind(1),
            whole.bias.unflatten(0, heads).unbind(1),
            strict=True,
        )
    )
    q, k, v = fold_norm(layer.input_layernorm, q, k, v)
    (up,) = fold_norm(layer.post_attention_layernorm, linear(layer.mlp.dense_h_to_4h))
    return Block(q, k, v, linear(layer.attention.dense), up, linear(layer.mlp.dense_4h_to_h))


def llama_options(config: Any) -> dict[str, Any]:
    require(config, "hidden_act", "silu")
    require(config, "head_dim", config.hidden_size // config.num_attention_heads, None)
    window = getattr(config, "sliding_window", None)
    if window is not None and window < config.max_position_embeddings:
        raise ValueError(
            f"the source has a sliding window of {window} positions; only full attention to all "
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


def llama_block(model: PreTrainedModel, layer: Any, index: int) -> Block:
    attention, mlp = layer.self_attn, layer.mlp
    q, k, v = fold_norm(
        layer.input_layernorm,
        *map(linear, (attention.q_proj, attention.k_proj, attention.v_proj)),
    )
    up, gate = fold_norm(layer.post_attention_layernorm, linear(mlp.up_proj), linear(mlp.gate_proj))
    return Block(q, k, v, linear(attention.o_proj), up, linear(mlp.down_proj), gate)


def baseline_options(config: Any) -> dict[str, Any]:
    names = (
        "num_key_value_heads", "positions", "rotary_fraction", "rotary_base", "norm", "norm_eps",
        "final_norm_parameters", "residual", "hidden_act",
    )  # fmt: skip
    return shape_options(config) | {name: getattr(config, name) for name in names}


def baseline_block(model: PreTrainedModel, layer: Any, index: int) -> Block:
    attention, ffn = layer.attention, layer.ffn
    q, k, v = fold_norm(layer.attention_norm, *map(linear, (attention.q, attention.k, attention.v)))
    inner = (ffn.up, ffn.gate) if model.config.mlp == "swiglu" else (ffn.up,)
    up, *gate = fold_norm(layer.ffn_norm, *map(linear, inner))
    return Block(q, k, v, linear(attention.o), up, linear(ffn.down), *gate)


LLAMA = Architecture(
    llama_options,
    llama_block,
    layers="model.layers",
    attention_norm="input_layernorm",
    ffn_norm="post_attention_layernorm",
    output="self_attn.o_proj",
    final_norm="model.norm",
)
ARCHITECTURES = {
    "gpt2": Architecture(
        gpt2_options,
        gpt2_block,
        layers="transformer.h",
        attention_norm="ln_1",
        ffn_norm="ln_2",
        output="attn.c_proj",
        final_norm="transformer.ln_f",
        positions="transformer.wpe",
    ),
    "gpt_neox": Architecture(
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
    "tokenformer_transformer": Architecture(
        baseline_options,
        baseline_block,
        layers="model.layers",
        attention_norm="attention_norm",
        ffn_norm="ffn_norm",
        output="attention.o",
        final_norm="model.norm",
        positions="model.positions",
    ),
}


@torch.no_grad()
def tensors_outside_blocks(model: PreTrainedModel, architecture: Architecture) -> dict[str, Tensor]:
    """Return the embeddings, positions, final norm and head, by our names."""
    norm = model.get_submodule(architecture.final_norm)
    tensors = {f"model.norm.{name}": tensor for name, tensor in norm.named_parameters()}
    tensors["model.embed_tokens.weight"] = model.get_input_embeddings().weight
    if not model.config.tie_word_embeddings:
        tensors["lm_head.weight"] = model.get_output_embeddings().weight
    if architecture.positions is not None:
        table = getattr(model.get_submodule(architecture.positions), "weight", None)
        if table is not None:
            tensors["model.positions.weight"] = table
    return tensors
