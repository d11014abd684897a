"""Parameters, FLOPs and memory of a model, computed from its configuration.

The paper's formulas (section 4.1), for both families and every option:

    config = TokenformerConfig.from_preset("354m")
    sum(count_parameters(config).values())          # 354,190,848
    sum(active_parameters(config).values())         # fewer if projections are routed
    sum(training_flops(config, 1024).values())      # of one sequence of 1024 tokens
    sum(activation_bytes(config, batch_size=8, length=1024).values())
    matching_transformer(config)                    # the baseline to compare with

Every function returns a dict of counts by part. No model is built or run;
`docs/guides/accounting.md` explains the parts.
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
from tokenformer.models.image_text_configuration import TokenformerImageTextConfig
from tokenformer.models.presets import TRANSFORMER_PRESETS
from tokenformer.ops.backends import saved_bytes
from tokenformer.ops.backends.interface import Sizes

FLOAT_BYTES = 4
INDEX_BYTES = 8

GROWTH_SIZES = tuple(TRANSFORMER_PRESETS)
"""The four sizes of the paper's growth experiments, each with a Transformer baseline."""


def count_parameters(config: LanguageConfig | VisionConfig) -> dict[str, int]:
    """Parameters by part; 0 for parts the model does not have."""
    d = config.hidden_size
    learned_scales = isinstance(config, TokenConfig) and config.learned_scale
    ends = _image_ends(config) if isinstance(config, VisionConfig) else _text_ends(config)
    images = (
        {"images": _image_input_parameters(config)}
        if isinstance(config, TokenformerImageTextConfig)
        else {}
    )
    return {
        "embedding": ends["embedding"],
        "positions": ends["positions"],
        **images,
        **_projection_parameters(config),
        "routers": _router_parameters(config) + _routed_biases(config),
        "scales": len(PROJECTIONS) * config.num_hidden_layers if learned_scales else 0,
        "norms": d
        * (
            2 * config.num_hidden_layers * _norm_vectors(config.norm_parameters)
            + _norm_vectors(config.final_norm_parameters)
        ),
        "head": ends["head"],
    }


def active_parameters(config: LanguageConfig | VisionConfig) -> dict[str, int]:
    """Parameters by part that one input row multiplies or looks up: of a routed projection only the
    tokens of the active groups. Without routing, all of `count_parameters`."""
    return {**count_parameters(config), **_projection_parameters(config, active=True)}


def _text_ends(config: LanguageConfig) -> dict[str, int]:
    d, vocabulary = config.hidden_size, config.vocab_size
    return {
        "embedding": vocabulary * d,
        "positions": config.max_position_embeddings * d if config.positions == "learned" else 0,
        "head": 0 if config.tie_word_embeddings else vocabulary * d,
    }


def _image_ends(config: VisionConfig) -> dict[str, int]:
    """Patches and head have biases; the class token counts as embedding."""
    d = config.hidden_size
    return {
        "embedding": d * (config.patch_channels + 1 + config.class_tokens),
        "positions": d * config.num_positions,
        "head": config.num_labels * (d + 1),
    }


def _image_input_parameters(config: TokenformerImageTextConfig) -> int:
    """Parameters that turn images into inputs of the layers: patch embedding and final norm of a
    joint model, else encoder and projector."""
    vision, d = config.vision_config, config.hidden_size
    if config.is_joined:
        ends = _image_ends(vision)
        norm = d * _norm_vectors(vision.final_norm_parameters)
        return ends["embedding"] + ends["positions"] + norm
    encoder = count_parameters(vision)
    wide, hidden = vision.hidden_size, config.projector_size
    projector = hidden * (wide + 1) + d * (hidden + 1)
    return sum(encoder.values()) - encoder["head"] + projector


def forward_flops(config: LanguageConfig, length: int) -> dict[str, int]:
    """FLOPs of the forward pass of one sequence of `length` tokens, by part.

    A multiply-add is two FLOPs. Attention counts all pairs of tokens, as in the paper; a causal
    kernel may skip half of them.
    """
    head = 2 * config.vocab_size * config.hidden_size * length
    return {**_block_flops(config, length), "head": head}


def image_forward_flops(config: VisionConfig) -> dict[str, int]:
    """FLOPs of the forward pass of one image of the model's image size, by part."""
    d, patches = config.hidden_size, config.grid_size**2
    return {
        "embedding": 2 * config.patch_channels * d * patches,
        **_block_flops(config, config.num_positions),
        "head": 2 * config.num_labels * d,
    }


def image_training_flops(config: VisionConfig) -> dict[str, int]:
    """FLOPs of forward and backward of one image; see `training_flops`."""
    return {part: 3 * flops for part, flops in image_forward_flops(config).items()}


def image_text_forward_flops(config: TokenformerImageTextConfig, length: int) -> dict[str, int]:
    """FLOPs of the forward pass of one image of the model's size and `length` tokens of text, with
    logits for the text only. `encoder` is that of mode `projector`."""
    vision, d = config.vision_config, config.hidden_size
    positions = vision.num_positions
    blocks = _block_flops(config, length + positions)
    patches = 2 * vision.patch_channels * vision.hidden_size * vision.grid_size**2
    if config.mode == "routed":
        # Every position is multiplied with the tokens of its own modality only.
        for part, widths in _token_widths(config).items():
            blocks[part] = sum(
                2 * width * ((vision_n + new) * positions + (new + language) * length)
                for name, width in widths.items()
                for layer in range(config.num_hidden_layers)
                for vision_n, new, language in [config.parts(name, layer)]
            )
    head = {"head": 2 * config.vocab_size * d * length}
    if config.is_joined:
        return {"images": patches, **blocks, **head}
    encoder = sum(flops for part, flops in image_forward_flops(vision).items() if part != "head")
    projector = 2 * positions * config.projector_size * (vision.hidden_size + d)
    return {"encoder": encoder, "images": projector, **blocks, **head}


def image_text_training_flops(config: TokenformerImageTextConfig, length: int) -> dict[str, int]:
    """FLOPs of forward and backward; see `training_flops`. A frozen encoder has no backward."""
    return {
        part: flops if part == "encoder" else 3 * flops
        for part, flops in image_text_forward_flops(config, length).items()
    }


def _token_widths(config: TokenConfig) -> dict[str, dict[str, int]]:
    """Numbers of a token, its key and value, by part and projection."""
    d, kv = config.hidden_size, config.key_value_size
    return {
        "qkv": {"q": 2 * d, "k": d + kv, "v": d + kv},
        "output": {"o": 2 * d},
        "ffn": {"ffn": 2 * d},
    }


def _block_flops(config: BlockConfig, length: int) -> dict[str, int]:
    # Every weight of a projection, including key and value tokens, multiplies every token once; of
    # a routed one, those of the active groups.
    weights, routing = _projection_parameters(config, active=True), _routing_weights(config)
    projections = {part: 2 * (weights[part] + routing[part]) * length for part in weights}
    return {
        "qkv": projections["qkv"],
        "token_token": 4 * config.num_hidden_layers * config.hidden_size * length**2,
        "output": projections["output"],
        "ffn": projections["ffn"],
    }


def training_flops(config: LanguageConfig, length: int) -> dict[str, int]:
    """FLOPs of forward and backward. The backward pass has two products per product of the forward
    pass, one for the gradient of each factor."""
    return {part: 3 * flops for part, flops in forward_flops(config, length).items()}


def state_bytes(config: LanguageConfig | VisionConfig) -> dict[str, int]:
    """Bytes of weights, gradients and AdamW state in fp32 training: 16 per parameter."""
    parameters = sum(count_parameters(config).values())
    return {
        "weights": FLOAT_BYTES * parameters,
        "gradients": FLOAT_BYTES * parameters,
        "adamw_moments": 2 * FLOAT_BYTES * parameters,
    }


def activation_bytes(config: LanguageConfig, batch_size: int, length: int) -> dict[str, int]:
    """Bytes that fp32 autograd saves for the backward pass of model and loss.

    This is eager execution on a CPU with fused attention and the `direct` backend. Each tensor is
    counted under the first part that needs it.
    """
    d, layers, rows = config.hidden_size, config.num_hidden_layers, batch_size * length
    stream = FLOAT_BYTES * rows * d  # one copy of the residual stream, [B, T, d]
    keys_and_values = 2 * FLOAT_BYTES * rows * config.key_value_size
    log_sums = FLOAT_BYTES * rows * config.num_attention_heads
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
        "output": inner["output"],
        "ffn": layers * stream + inner["ffn"],
        # The input of the head, the log-probabilities, the labels and their count.
        "head": stream + rows * (FLOAT_BYTES * config.vocab_size + INDEX_BYTES) + FLOAT_BYTES,
    }


def matching_transformer(
    config: TokenformerConfig, *, match_ffn: bool = False
) -> TransformerConfig:
    """Return the Transformer baseline of a TokenFormer. It has the same shared options, and

    - for the four sizes of the paper's growth experiments, the width of the paper's Transformer;
    - else the width, in heads of the same size, with the closest parameter count.

    With few heads that width is coarse: `match_ffn` then changes the hidden units of the
    feed-forward layers, in steps of 8, so that the parameter counts agree. It has no effect on
    the four sizes.
    """
    for size in GROWTH_SIZES:
        if _has_shape(config, TokenformerConfig.from_preset(size)):
            heads = TRANSFORMER_PRESETS[size]["hidden_size"] // config.head_dim
            return _transformer_like(config, heads)
    wanted = sum(count_parameters(config).values())
    group = config.hidden_size // config.key_value_size  # query heads per key-value head

    def parameters(groups: int) -> int:
        return sum(count_parameters(_transformer_like(config, group * groups)).values())

    # A model has more parameters than its width squared, which bounds the search.
    larger = bisect_left(range(math.isqrt(wanted) + 2), wanted, lo=1, key=parameters)
    nearest = min((max(larger - 1, 1), larger), key=lambda count: abs(parameters(count) - wanted))
    transformer = _transformer_like(config, group * nearest)
    if match_ffn:
        counts, units = count_parameters(transformer), transformer.intermediate_size
        missing = wanted - sum(counts.values())
        transformer.intermediate_size = max(8, 8 * round(units * (1 + missing / counts["ffn"]) / 8))
    return transformer


def _has_shape(config: TokenformerConfig, other: TokenformerConfig) -> bool:
    """Whether depth, width, heads and token counts are equal, however they are specified."""

    def shape(c: TokenformerConfig) -> list[object]:
        sizes = (c.num_hidden_layers, c.hidden_size, c.num_attention_heads, c.key_value_size)
        return [sizes, [_tokens_by_layer(c, projection) for projection in PROJECTIONS]]

    return shape(config) == shape(other)


def _tokens_by_layer(config: TokenConfig, projection: str) -> list[int]:
    return [config.tokens(projection, layer) for layer in range(config.num_hidden_layers)]


def _active_by_layer(config: TokenConfig, projection: str) -> list[int]:
    """Tokens that an input row attends to."""
    found = []
    for layer, tokens in enumerate(_tokens_by_layer(config, projection)):
        groups = config.active(projection, layer)
        found.append(tokens if groups is None else min(tokens, groups * config.group_size))
    return found


def _routed_groups(config: BlockConfig, projection: str) -> list[int]:
    """The number of groups of every routed layer."""
    if not isinstance(config, TokenConfig):
        return []
    layers = range(config.num_hidden_layers)
    routed = [layer for layer in layers if config.active(projection, layer) is not None]
    return [config.groups(projection, layer) for layer in routed]


def _router_parameters(config: BlockConfig) -> int:
    if not isinstance(config, TokenConfig) or config.router == "centroid":
        return 0
    return config.hidden_size * sum(sum(_routed_groups(config, p)) for p in PROJECTIONS)


def _routed_biases(config: BlockConfig) -> int:
    if not isinstance(config, TokenConfig) or not config.routed_bias:
        return 0
    widths = dict.fromkeys(PROJECTIONS, config.hidden_size)
    widths |= dict.fromkeys("kv", config.key_value_size)
    return sum(widths[name] * len(_routed_groups(config, name)) for name in PROJECTIONS)


def _routing_weights(config: BlockConfig) -> dict[str, int]:
    """Weights by part that multiply an input row to choose its groups, and for the norm over all
    tokens. The Gram matrix, which is computed once per batch, is not counted."""
    d = config.hidden_size

    def of(*projections: str) -> int:
        groups = [count for name in projections for count in _routed_groups(config, name)]
        norms = isinstance(config, TokenConfig) and config.theta_norm == "all"
        return d * sum(groups) + (d * d * len(groups) if norms else 0)

    return {"qkv": of("q", "k", "v"), "output": of("o"), "ffn": of("ffn")}


def _transformer_like(config: TokenformerConfig, heads: int) -> TransformerConfig:
    """Return a Transformer with `heads` heads and the other options of `config`."""
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


def _projection_parameters(config: BlockConfig, *, active: bool = False) -> dict[str, int]:
    """Parameters of the five projections, summed over layers; with `active` those that an input row
    visits."""
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
    # A token is a key of d channels and a value of the width of the output.
    by_layer = _active_by_layer if active else _tokens_by_layer
    q, k, v, o, ffn = (sum(by_layer(config, projection)) for projection in PROJECTIONS)
    return {"qkv": 2 * d * q + (d + kv) * (k + v), "output": 2 * d * o, "ffn": 2 * d * ffn}


def _norm_vectors(parameters: str) -> int:
    return len([name for name in parameters.split("_") if name != "none"])


def _norm_bytes(config: LanguageConfig, parameters: str, rows: int) -> int:
    """Bytes one norm saves besides its input. The projections save its output."""
    if config.norm == "layer_norm":
        return 2 * FLOAT_BYTES * rows  # mean and inverse deviation
    scaled = "weight" in parameters.split("_")  # the normalized rows, before the weight
    return FLOAT_BYTES * rows * (1 + (config.hidden_size if scaled else 0))


def _projection_bytes(config: LanguageConfig, part: str, rows: int) -> int:
    """Bytes the projections of `part` save besides their input, summed over layers."""
    if isinstance(config, TransformerConfig):
        if part != "ffn":
            return 0  # a linear layer saves only its input
        # Input and output of GELU; for SwiGLU the gate, its SiLU, the up projection, the product.
        copies = 4 if config.mlp == "swiglu" else 2
        return config.num_hidden_layers * FLOAT_BYTES * rows * copies * config.intermediate_size
    assert isinstance(config, TokenformerConfig)
    names = {"qkv": ("q", "k", "v"), "output": ("o",), "ffn": ("ffn",)}[part]
    widths = {"k": config.key_value_size, "v": config.key_value_size}
    total = 0
    for name in names:
        width = widths.get(name, config.hidden_size)
        for layer, tokens in enumerate(_tokens_by_layer(config, name)):
            groups = config.active(name, layer)
            if groups is None:
                sizes = Sizes(rows, config.hidden_size, tokens, width)
                total += saved_bytes("direct", config.theta, sizes)
            else:
                total += _routed_bytes(config, groups, config.groups(name, layer), rows)
    return total


def _routed_bytes(config: TokenformerConfig, active: int, groups: int, rows: int) -> int:
    """Bytes a routed projection saves besides its input: the scores of the active groups, their
    indices and the statistics of theta; for the norm over all tokens the norm, whether it is zero,
    and the factor of the Gram matrix; for a router with weights the normalized input, the scores of
    all groups and the gates."""
    d = config.hidden_size
    floats = rows * (active * config.group_size + 2) + 1
    others = INDEX_BYTES * rows * active
    if config.theta_norm == "all":
        floats += 2 * rows + (d * d if rows >= d else 0)
        others += rows
    if config.router != "centroid":
        floats += rows * (d + 1 + groups + 2 * active)
    return FLOAT_BYTES * floats + others
