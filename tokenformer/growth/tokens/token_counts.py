"""What a TokenFormer is to become: token counts by projection and layer, and the new config.

Growth adds tokens, pruning drops them. A plan refuses what goes the other way, and another width or
depth.
"""

import math
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from tokenformer.models.configuration import PROJECTIONS, TokenConfig, Tokens

Place = tuple[str, int]
"""A projection (q, k, v, o or ffn) and the number of its layer."""
Sizes = dict[Place, int]
"""Tokens by place."""

TOKEN_OPTIONS = ("qkv_tokens", "output_tokens", "ffn_tokens", "q_tokens", "k_tokens", "v_tokens")
FIXED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def sizes_of(config: TokenConfig) -> Sizes:
    return {
        (projection, layer): config.tokens(projection, layer)
        for projection in PROJECTIONS
        for layer in range(config.num_hidden_layers)
    }


def check_not_quantized(config: Any) -> None:
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError("the model is quantized to int8; use the model it was quantized from")


def target_sizes(
    config: TokenConfig, to: str | TokenConfig | None, tokens: Mapping[str, Tokens]
) -> Sizes:
    """The token counts asked for, by a size (a preset's name or a configuration) or one by one."""
    check_not_quantized(config)
    if (to is None) == (not tokens):
        raise ValueError("give either a size to grow to or numbers of tokens, such as ffn_tokens")
    if to is None:
        to = with_tokens(config, tokens)
    elif isinstance(to, str):
        to = type(config).from_preset(to)
    for name in FIXED:
        before, after = getattr(config, name), getattr(to, name)
        if before != after:
            raise ValueError(
                f"growth adds tokens; it cannot change {name} from {before} to {after}"
            )
    before, after = sizes_of(config), sizes_of(to)
    for (projection, layer), size in after.items():
        if size < before[projection, layer]:
            raise ValueError(
                f"{projection} of layer {layer} has {before[projection, layer]} tokens, more than "
                f"{size}; growth cannot shrink a model, tokenformer.prune can"
            )
    return after


def pruned_sizes(config: TokenConfig, keep: float | None, tokens: Mapping[str, Tokens]) -> Sizes:
    """The token counts to prune to: a share of every layer's, or one by one."""
    if (keep is None) == (not tokens):
        raise ValueError("give either a share to keep or numbers of tokens, such as ffn_tokens")
    before = sizes_of(config)
    if keep is not None:
        check_share("keep", keep)
        return {place: share_of(size, keep) for place, size in before.items()}
    after = sizes_of(with_tokens(config, tokens))
    for (projection, layer), size in after.items():
        if size > before[projection, layer]:
            raise ValueError(
                f"{projection} of layer {layer} has {before[projection, layer]} tokens, fewer than "
                f"{size}; pruning cannot enlarge a model, tokenformer.grow can"
            )
    return after


def with_tokens(config: TokenConfig, tokens: Mapping[str, Tokens]) -> TokenConfig:
    """`config` with some of its token counts changed, and neither scales nor rates of its own."""
    for name in tokens:
        if name not in TOKEN_OPTIONS:
            raise ValueError(f"{name!r} is not an option; choose from {', '.join(TOKEN_OPTIONS)}")
    options: dict[str, Any] = config.to_dict() | {"scale_tokens": None, "token_rates": None}
    if "qkv_tokens" in tokens:  # one number for the three, unless one is named too
        options |= {"q_tokens": None, "k_tokens": None, "v_tokens": None}
    return type(config).from_dict(options | dict(tokens))


def check_share(name: str, share: float) -> None:
    if not 0 < share <= 1:
        raise ValueError(f"{name}={share} must be above 0 and at most 1")


def share_of(size: int, share: float) -> int:
    """A share of a number of tokens, rounded up; 0.1 of 30 is 3, whatever floats make of it."""
    check_share("share", share)
    return max(1, math.ceil(round(size * share, 6)))


def config_with_tokens(
    config: TokenConfig,
    sizes: Sizes,
    scales: Mapping[Place, float] | None = None,
    *,
    learned_scale: bool = False,
    rates: Mapping[Place, list[float]] | None = None,
) -> TokenConfig:
    """`config` with other token counts and scales, and nothing else changed."""
    options = config.to_dict()
    layers = range(config.num_hidden_layers)
    counts = {p: simplest([sizes[p, layer] for layer in layers]) for p in PROJECTIONS}
    options |= {"output_tokens": counts["o"], "ffn_tokens": counts["ffn"]}
    same = counts["q"] == counts["k"] == counts["v"]
    options["qkv_tokens"] = counts["q"]
    for projection in "qkv":
        options[f"{projection}_tokens"] = None if same else counts[projection]
    own = {p: [own_scale(p, layer, sizes, scales or {}) for layer in layers] for p in PROJECTIONS}
    own = {p: values for p, values in own.items() if any(v is not None for v in values)}
    options["scale_tokens"] = own or None
    options["learned_scale"] = learned_scale
    slow = {place: runs(of_rows) for place, of_rows in (rates or {}).items() if set(of_rows) != {1}}
    projections = [p for p in PROJECTIONS if any(place[0] == p for place in slow)]
    options["token_rates"] = {
        p: [slow.get((p, layer)) for layer in layers] for p in projections
    } or None
    return type(config).from_dict(options)


def simplest(counts: list[int]) -> Tokens:
    return counts[0] if len(set(counts)) == 1 else counts


def own_scale(
    projection: str, layer: int, sizes: Sizes, scales: Mapping[Place, float]
) -> float | None:
    """The scale of a place, unless it is its number of tokens."""
    scale = scales.get((projection, layer))
    return None if scale == sizes[projection, layer] else scale


def runs(rates: list[float]) -> list[list[float]]:
    """Equal neighbours counted: [0, 0, 1] is [[2, 0], [1, 1]]."""
    return [[len([*group]), rate] for rate, group in groupby(rates)]
