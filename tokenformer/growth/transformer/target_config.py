"""The configuration to grow a Transformer to: the requested sizes, and the others in proportion.

The head size does not change, so that rotary positions and scores stay the same. A wider model has
more heads.
"""

from collections.abc import Mapping
from typing import Any

from tokenformer.models.block_configuration import check_count
from tokenformer.models.configuration import TransformerConfig

SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
)
FIXED = (
    "vocab_size",
    "positions",
    "rotary_fraction",
    "rotary_base",
    "norm",
    "norm_parameters",
    "final_norm_parameters",
    "residual",
    "hidden_act",
    "mlp",
    "tie_word_embeddings",
)
"""Options that growth cannot change."""


def target_config(
    config: TransformerConfig, to: str | TransformerConfig | None, sizes: Mapping[str, int]
) -> TransformerConfig:
    """Return `config` with the sizes of a preset, of another configuration, or as given."""
    if (to is None) == (not sizes):
        raise ValueError(f"give either a size to grow to or any of {', '.join(SIZES)}")
    for name, size in sizes.items():
        check_count(name, size)
    if isinstance(to, str):
        target = config_sizes(TransformerConfig.from_preset(to, mlp=config.mlp))
        target["num_key_value_heads"] = key_value_heads(config, target["num_attention_heads"])
    elif to is not None:
        check_fixed_options(config, to)
        target = config_sizes(to)
    else:
        target = complete_sizes(config, sizes)
    for name, size in target.items():
        if size < getattr(config, name):
            raise ValueError(
                f"{name}={size} is less than the model's {getattr(config, name)}; "
                "growth cannot shrink a model"
            )
    after = TransformerConfig.from_dict({**config.to_dict(), **target})
    check_heads(config, after)
    return after


def config_sizes(config: TransformerConfig) -> dict[str, int]:
    return {name: getattr(config, name) for name in SIZES}


def complete_sizes(config: TransformerConfig, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return all sizes: heads follow the width or the width the heads, the rest in proportion."""
    target = {**config_sizes(config), **sizes}
    if "hidden_size" not in sizes:
        target["hidden_size"] = target["num_attention_heads"] * config.head_dim
    elif "num_attention_heads" not in sizes:
        heads, rest = divmod(target["hidden_size"], config.head_dim)
        if rest:
            raise ValueError(
                f"hidden_size={target['hidden_size']} must be a multiple of {config.head_dim}, "
                "the size of a head"
            )
        target["num_attention_heads"] = heads
    if "num_key_value_heads" not in sizes:
        target["num_key_value_heads"] = key_value_heads(config, target["num_attention_heads"])
    if "intermediate_size" not in sizes:
        units, rest = divmod(config.intermediate_size * target["hidden_size"], config.hidden_size)
        if rest:
            raise ValueError(
                f"hidden_size={target['hidden_size']}: intermediate_size in proportion is not an "
                "integer; give intermediate_size too"
            )
        target["intermediate_size"] = units
    return target


def key_value_heads(config: TransformerConfig, heads: int) -> int:
    """Return the number of key-value heads that keeps the group size."""
    group = config.num_attention_heads // config.num_key_value_heads
    if heads % group:
        raise ValueError(
            f"num_attention_heads={heads} must be a multiple of {group}, the query heads per "
            "key-value head; or give num_key_value_heads too"
        )
    return heads // group


def check_fixed_options(config: TransformerConfig, to: Any) -> None:
    if not isinstance(to, TransformerConfig):
        raise ValueError(f"a Transformer grows to a TransformerConfig, not a {type(to).__name__}")
    learned = ("max_position_embeddings",) if config.positions == "learned" else ()
    for name in (*FIXED, *learned):
        before, after = getattr(config, name), getattr(to, name)
        if before != after:
            raise ValueError(f"growth cannot change {name} from {before!r} to {after!r}")


def check_heads(config: TransformerConfig, after: TransformerConfig) -> None:
    if after.head_dim != config.head_dim:
        raise ValueError(
            f"hidden_size={after.hidden_size} over num_attention_heads="
            f"{after.num_attention_heads} gives a head size of {after.head_dim}; growth keeps the "
            f"model's {config.head_dim}"
        )
    groups = [c.num_attention_heads // c.num_key_value_heads for c in (config, after)]
    if groups[1] < groups[0]:
        raise ValueError(
            f"num_key_value_heads={after.num_key_value_heads} leaves {groups[1]} query heads per "
            f"key-value head; growth keeps at least the model's {groups[0]}"
        )
