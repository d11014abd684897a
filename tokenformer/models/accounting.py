"""What a model costs: parameters, FLOPs and memory, by arithmetic on its configuration.

The paper's table of formulas (section 4.1), for both families and every option of ours:

    config = TokenformerConfig.from_preset("354m")
    sum(count_parameters(config).values())          # 354,190,848
    sum(training_flops(config, 1024).values())      # of one sequence of 1024 tokens
    sum(activation_bytes(config, batch_size=8, length=1024).values())
    twin(config)                                    # the Transformer to compare with

Every count comes by part, as a dict of ints. Nothing is built or run; `docs/guides/accounting.md`
says what each part includes.
"""

import math
from bisect import bisect_left
from dataclasses import fields

from tokenformer.models.block_configuration import BlockConfig
from tokenformer.models.configuration import (
    PROJECTIONS,
    LanguageConfig,
    MatrixConfig,
    TokenConfig,
    TokenformerConfig,
    TransformerConfig,
    VisionConfig,
)
from tokenformer.models.presets import TRANSFORMER_PRESETS
from tokenformer.ops.backends import saved_bytes
from tokenformer.ops.backends.interface import Sizes

FLOAT_BYTES = 4
INDEX_BYTES = 8

GROWTH_SIZES = tuple(TRANSFORMER_PRESETS)
"""The four sizes the paper grows through, each with a Transformer of its own."""


def count_parameters(config: LanguageConfig | VisionConfig) -> dict[str, int]:
    """Learned numbers by part; a part the model does not have counts zero."""
    d = config.hidden_size
    learned_scales = isinstance(config, TokenConfig) and config.learned_scale
    ends = _image_ends(config) if isinstance(config, VisionConfig) else _text_ends(config)
    return {
        "embedding": ends["embedding"],
        "positions": ends["positions"],
        **_projection_parameters(config),
        "scales": len(PROJECTIONS) * config.num_hidden_layers if learned_scales else 0,
        "norms": d
        * (
            2 * config.num_hidden_layers * _norm_vectors(config.norm_parameters)
            + _norm_vectors(config.final_norm_parameters)
        ),
        "head": ends["head"],
    }


def _text_ends(config: LanguageConfig) -> dict[str, int]:
    d, vocabulary = config.hidden_size, config.vocab_size
    return {
        "embedding": vocabulary * d,
        "positions": config.max_position_embeddings * d if config.positions == "learned" else 0,
        "head": 0 if config.tie_word_embeddings else vocabulary * d,
    }


def _image_ends(config: VisionConfig) -> dict[str, int]:
    """Patches and head have biases; the class token is booked with the patches."""
    d = config.hidden_size
    return {
        "embedding": d * (config.patch_channels + 1 + config.class_tokens),
        "positions": d * config.num_positions,
        "head": config.num_labels * (d + 1),
    }


def forward_flops(config: LanguageConfig, length: int) -> dict[str, int]:
    """FLOPs of the forward pass of one sequence of `length` tokens, by part.

    A multiply-add counts two. Attention is counted over all pairs of tokens, as in the paper; a
    causal kernel may skip half of them.
    """
    head = 2 * config.vocab_size * config.hidden_size * length
    return {**_block_flops(config, length), "head": head}


def image_forward_flops(config: VisionConfig) -> dict[str, int]:
    """FLOPs of the forward pass of one image of the model's own size, by part."""
    d, patches = config.hidden_size, config.grid_size**2
    return {
        "embedding": 2 * config.patch_channels * d * patches,
        **_block_flops(config, config.num_positions),
        "head": 2 * config.num_labels * d,
    }


def image_training_flops(config: VisionConfig) -> dict[str, int]:
    """FLOPs of forward and backward of one image; see `training_flops`."""
    return {part: 3 * flops for part, flops in image_forward_flops(config).items()}


def _block_flops(config: BlockConfig, length: int) -> dict[str, int]:
    # Every weight of a projection, key and value tokens included, meets every token once.
    projections = {
        part: 2 * weights * length for part, weights in _projection_parameters(config).items()
    }
    return {
        "qkv": projections["qkv"],
        "token_token": 4 * config.num_hidden_layers * config.hidden_size * length**2,
        "output": projections["output"],
        "ffn": projections["ffn"],
    }


def training_flops(config: LanguageConfig, length: int) -> dict[str, int]:
    """FLOPs of forward and backward: the backward pass repeats each product of the forward pass
    twice, once for the gradient of either factor."""
    return {part: 3 * flops for part, flops in forward_flops(config, length).items()}


def state_bytes(config: LanguageConfig | VisionConfig) -> dict[str, int]:
    """Bytes of what lasts from step to step in fp32 training with AdamW: 16 per parameter."""
    parameters = sum(count_parameters(config).values())
    return {
        "weights": FLOAT_BYTES * parameters,
        "gradients": FLOAT_BYTES * parameters,
        "adamw_moments": 2 * FLOAT_BYTES * parameters,
    }


def activation_bytes(config: LanguageConfig, batch_size: int, length: int) -> dict[str, int]:
    """Bytes that fp32 autograd keeps from the forward pass, loss included, for the backward pass.

    They hold for eager execution on a CPU with fused attention and the `direct` pattention; each
    tensor is booked under the part that needs it, and one that several parts need under the first.
    """
    d, layers, rows = config.hidden_size, config.num_hidden_layers, batch_size * length
    stream = FLOAT_BYTES * rows * d  # one copy of the residual stream, [B, T, d]
    keys_and_values = 2 * FLOAT_BYTES * rows * config.key_value_size
    log_sums = FLOAT_BYTES * rows * config.num_attention_heads
    rotary = config.positions == "rotary"
    inner = {part: _projection_bytes(config, part, rows) for part in ("qkv", "output", "ffn")}
    position_bytes = {
        "rotary": 2 * FLOAT_BYTES * length * config.rotary_dim,  # cos and sin
        "learned": INDEX_BYTES * length,
        "none": 0,
    }
    # The two norms of a parallel block read the same stream.
    norm_inputs = layers * (1 if config.residual == "parallel" else 2) + 1
    block_norm = _norm_bytes(config, config.norm_parameters, rows)
    final_norm = _norm_bytes(config, config.final_norm_parameters, rows)
    return {
        "embedding": INDEX_BYTES * rows,
        "positions": position_bytes[config.positions],
        "norms": norm_inputs * stream + 2 * layers * block_norm + final_norm,
        "qkv": layers * stream + inner["qkv"],
        "token_token": layers * (2 * stream + keys_and_values + log_sums),
        # Rotated queries lie head by head, and so does what attention returns: it is copied.
        "output": (layers * stream if rotary else 0) + inner["output"],
        "ffn": layers * stream + inner["ffn"],
        # The head's input, the log-probabilities, the labels, and their number.
        "head": stream + rows * (FLOAT_BYTES * config.vocab_size + INDEX_BYTES) + FLOAT_BYTES,
    }


def twin(config: TokenformerConfig) -> TransformerConfig:
    """The Transformer to compare a TokenFormer with: all options that the families share, and

    - for the four sizes of the paper's growth experiments, the width of the paper's Transformer;
    - else the width, in whole heads of the same size, whose parameter count is nearest.
    """
    for size in GROWTH_SIZES:
        if _has_shape(config, TokenformerConfig.from_preset(size)):
            heads = TRANSFORMER_PRESETS[size]["hidden_size"] // config.head_dim
            return _transformer_like(config, heads)
    wanted = sum(count_parameters(config).values())
    group = config.hidden_size // config.key_value_size  # query heads of one key-value head

    def parameters(groups: int) -> int:
        return sum(count_parameters(_transformer_like(config, group * groups)).values())

    # A model has more parameters than its width squared, which bounds the search.
    larger = bisect_left(range(math.isqrt(wanted) + 2), wanted, lo=1, key=parameters)
    nearest = min((max(larger - 1, 1), larger), key=lambda count: abs(parameters(count) - wanted))
    return _transformer_like(config, group * nearest)


def _has_shape(config: TokenformerConfig, other: TokenformerConfig) -> bool:
    """Whether the layers are of the same number, width, heads and tokens, however written."""

    def shape(of: TokenformerConfig) -> list[object]:
        sizes = (of.num_hidden_layers, of.hidden_size, of.num_attention_heads, of.key_value_size)
        return [sizes, [_tokens_by_layer(of, projection) for projection in PROJECTIONS]]

    return shape(config) == shape(other)


def _tokens_by_layer(config: TokenConfig, projection: str) -> list[int]:
    return [config.tokens(projection, layer) for layer in range(config.num_hidden_layers)]


def _transformer_like(config: TokenformerConfig, heads: int) -> TransformerConfig:
    """The Transformer with so many heads and the rest of its options as in `config`."""
    own = {"hidden_size", "num_attention_heads", "num_key_value_heads"}
    ours = BlockConfig.__annotations__ | LanguageConfig.__annotations__
    shared = [f.name for f in fields(LanguageConfig) if f.name in ours and f.name not in own]
    group = config.hidden_size // config.key_value_size
    return TransformerConfig(
        **{name: getattr(config, name) for name in shared},
        hidden_size=heads * config.head_dim,
        num_attention_heads=heads,
        num_key_value_heads=heads // group,
    )


def _projection_parameters(config: BlockConfig) -> dict[str, int]:
    """The weights of the five learned maps, all layers together."""
    d, kv, layers = config.hidden_size, config.key_value_size, config.num_hidden_layers
    if isinstance(config, MatrixConfig):
        return {
            "qkv": layers * d * (d + 2 * kv),
            "output": layers * d * d,
            "ffn": layers * d * config.intermediate_size * (3 if config.mlp == "swiglu" else 2),
        }
    if not isinstance(config, TokenConfig):
        raise TypeError(
            f"config is a {type(config).__name__}; give a TokenformerConfig or TransformerConfig"
        )
    # A token is a key of d channels and a value as wide as the projection's output.
    q, k, v, o, ffn = (sum(_tokens_by_layer(config, projection)) for projection in PROJECTIONS)
    return {"qkv": 2 * d * q + (d + kv) * (k + v), "output": 2 * d * o, "ffn": 2 * d * ffn}


def _norm_vectors(parameters: str) -> int:
    return len([name for name in parameters.split("_") if name != "none"])


def _norm_bytes(config: LanguageConfig, parameters: str, rows: int) -> int:
    """What one norm keeps besides its input. Its output is kept by the projections that read it."""
    if config.norm == "layer_norm":
        return 2 * FLOAT_BYTES * rows  # mean and inverse deviation
    scaled = "weight" in parameters.split("_")  # the normed rows, before the weight multiplies them
    return FLOAT_BYTES * rows * (1 + (config.hidden_size if scaled else 0))


def _projection_bytes(config: LanguageConfig, part: str, rows: int) -> int:
    """What the projections of `part` keep between their input and their output, in all layers."""
    if isinstance(config, TransformerConfig):
        if part != "ffn":
            return 0  # a linear map needs its input alone
        # GELU's two sides; for SwiGLU the gate, its SiLU, the other branch and their product.
        copies = 4 if config.mlp == "swiglu" else 2
        return config.num_hidden_layers * FLOAT_BYTES * rows * copies * config.intermediate_size
    assert isinstance(config, TokenformerConfig)
    names = {"qkv": ("q", "k", "v"), "output": ("o",), "ffn": ("ffn",)}[part]
    widths = {"k": config.key_value_size, "v": config.key_value_size}
    return sum(
        saved_bytes(
            "direct",
            config.theta,
            Sizes(rows, config.hidden_size, tokens, widths.get(name, config.hidden_size)),
        )
        for name in names
        for tokens in _tokens_by_layer(config, name)
    )
