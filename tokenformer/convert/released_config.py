"""Converting between the released config.json and our configuration.

The released file holds GPT-NeoX arguments. It has no model_type, may use `num-attention-heads` for
`num_attention_heads`, and its torch_dtype is not that of the weights. Options of the architecture
are checked, all others are ignored.
"""

from typing import Any

from tokenformer.errors import ConversionError
from tokenformer.models.configuration import PROJECTIONS, TokenformerConfig
from tokenformer.models.presets import TOKENFORMER_PRESETS

SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "qkv_slot_num": "qkv_tokens",
    "proj_slot_num": "output_tokens",
    "ffn_slot_num": "ffn_tokens",
}
"""Sizes that the tensors determine; the config must agree."""
OPTIONS = {
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
    "rotary_pct": "rotary_fraction",
    "rotary_emb_base": "rotary_base",
}
THETAS = {"l2_norm_gelu": "l2_gelu", "gelu_l2_norm": "gelu_l2", "softmax": "softmax"}
THETA = "norm_activation_type"
FIXED: dict[str, Any] = {
    "pos_emb": "rotary",
    "norm": "layernorm_nonparam",
    "final_norm": "layernorm",
    "layernorm_epsilon": 1e-5,
    "gpt_j_residual": False,
    "no_weight_tying": False,
    "use_bias_in_attn_linear": False,
}
"""The only architecture that the released tensor layout can hold."""
EXPRESSIBLE: dict[str, Any] = {
    "variant": "released",
    "positions": "rotary",
    "norm": "layer_norm",
    "norm_parameters": "none",
    "final_norm_parameters": "weight_bias",
    "norm_eps": 1e-5,
    "residual": "sequential",
    "hidden_act": "gelu",
    "theta_eps": 0.0,
    "learned_scale": False,
    "tie_word_embeddings": True,
}
"""The same as options of our configuration."""


def to_ours(document: dict[str, Any], sizes: dict[str, int], heads: int | None) -> dict[str, Any]:
    """Return the options of a TokenformerConfig, given the sizes of the tensors."""
    given = {str(name).replace("-", "_"): value for name, value in document.items()}
    for theirs, ours in SIZES.items():
        if theirs in given and given[theirs] != sizes[ours]:
            raise ConversionError(
                f"config.json has {theirs} {given[theirs]}, the tensors have {sizes[ours]}"
            )
    for name, value in FIXED.items():
        if given.get(name, value) != value:
            raise ConversionError(
                f"config.json has {name} {given[name]!r}; only {value!r} is supported"
            )
    options = {ours: given[name] for name, ours in OPTIONS.items() if given.get(name) is not None}
    num_heads = options.setdefault("num_attention_heads", heads)
    if num_heads is None:
        raise ConversionError(
            "there is no config.json with the number of attention heads; give "
            f"--num_attention_heads{published_heads(sizes)}"
        )
    if heads not in (None, num_heads):
        raise ConversionError(f"--num_attention_heads {heads}, but config.json has {num_heads}")
    theta = given.get(THETA, "l2_norm_gelu")
    if theta not in THETAS:
        raise ConversionError(
            f"config.json has {THETA} {theta!r}; supported are {', '.join(THETAS)}"
        )
    return {**sizes, **options, "theta": THETAS[theta]}


def published_heads(sizes: dict[str, int]) -> str:
    """Return a hint with the heads of the published model of these sizes, if there is one."""
    for name, preset in TOKENFORMER_PRESETS.items():
        if all(preset[ours] == sizes[ours] for ours in SIZES.values()):
            return f" ({preset['num_attention_heads']} in the published {name}, of this shape)"
    return ""


def to_released(config: TokenformerConfig) -> dict[str, Any]:
    """Return the released config.json of a model; raise if the format cannot hold it."""
    check_expressible(config)
    ours_to_theta = {ours: theirs for theirs, ours in THETAS.items()}
    sizes = {**SIZES, **OPTIONS}
    document: dict[str, Any] = {theirs: getattr(config, ours) for theirs, ours in sizes.items()}
    tokens = {"qkv_slot_num": "q", "proj_slot_num": "o", "ffn_slot_num": "ffn"}
    document |= {theirs: config.tokens(part, 0) for theirs, part in tokens.items()}
    document |= {**FIXED, THETA: ours_to_theta[config.theta]}
    return document | {"seq_length": config.max_position_embeddings}


def check_expressible(config: TokenformerConfig) -> None:
    wrong = [
        f"{name} is {getattr(config, name)!r}, not {value!r}"
        for name, value in EXPRESSIBLE.items()
        if getattr(config, name) != value
    ]
    if getattr(config, "quantization_config", None) is not None:
        wrong.append("it is quantized")
    if config.theta not in THETAS.values():
        wrong.append(f"theta is {config.theta!r}, not one of {', '.join(THETAS.values())}")
    if config.num_key_value_heads != config.num_attention_heads:
        wrong.append(
            f"num_key_value_heads is {config.num_key_value_heads}, not num_attention_heads"
        )
    for parts in (("q", "k", "v"), ("o",), ("ffn",)):
        layers = range(config.num_hidden_layers)
        counts = {config.tokens(part, layer) for part in parts for layer in layers}
        if len(counts) > 1:
            wrong.append(f"the token counts of {', '.join(parts)} differ: {sorted(counts)}")
    for part in PROJECTIONS:
        for layer in range(config.num_hidden_layers):
            scale, count = config.scale(part, layer), config.tokens(part, layer)
            if scale != count:
                wrong.append(f"scale_tokens of {part} in layer {layer} is {scale:g}, not {count}")
    if wrong:
        more = f" and {len(wrong) - 6} more" if len(wrong) > 6 else ""
        raise ConversionError(
            f"the released format cannot hold this model: {'; '.join(wrong[:6])}{more}"
        )
