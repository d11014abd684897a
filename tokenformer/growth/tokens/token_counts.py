"""Token counts by projection and layer, and the configuration for new ones.

Growth only adds tokens and pruning only drops them; width and depth do not change.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from tokenformer.models.configuration import (
    PROJECTIONS,
    TOKEN_OPTIONS,
    TokenConfig,
    Tokens,
    has_entries,
)
from tokenformer.models.image_text_configuration import TokenformerImageTextConfig

Count = TypeVar("Count", int, int | None)
LayerProjection = tuple[str, int]
"""A projection (q, k, v, o or ffn) and its layer number."""
TokenCounts = dict[LayerProjection, int]
"""Number of tokens of each projection."""

FIXED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def token_counts(config: TokenConfig) -> TokenCounts:
    return {
        (projection, layer): config.tokens(projection, layer)
        for projection in PROJECTIONS
        for layer in range(config.num_hidden_layers)
    }


def check_not_quantized(config: Any) -> None:
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError("the model is quantized; use the model it was quantized from")


def check_dense(config: TokenConfig, verb: str) -> None:
    if config.is_sparse:
        option = "active_groups" if config.is_routed else "thresholds"
        raise ValueError(
            f"{option}={getattr(config, option)}: only the tokens of a dense model {verb}; "
            "this one is sparse"
        )


def check_no_thresholds(config: TokenConfig, verb: str) -> None:
    if has_entries(config.thresholds):
        raise ValueError(
            f"thresholds={config.thresholds} hold for the tokens they were measured on: only the "
            f"dense model they were measured on {verb}"
        )


def check_projections(projections: Sequence[str]) -> None:
    if unknown := [name for name in projections if name not in PROJECTIONS]:
        raise ValueError(f"projections={unknown} are unknown; choose from {', '.join(PROJECTIONS)}")
    if not projections:
        raise ValueError("projections is empty; name at least one, such as ffn")


def check_not_joint(config: Any) -> None:
    """Refuse a vision-language model, whose layers hold the tokens of two models."""
    if isinstance(config, TokenformerImageTextConfig):
        raise ValueError(
            "a vision-language model cannot be merged, cut to a prefix or made sparse, and grows "
            "by new tokens only; change its vision or language model and join them again"
        )


def target_token_counts(
    config: TokenConfig, to: str | TokenConfig | None, tokens: Mapping[str, Tokens]
) -> TokenCounts:
    """Return the token counts of a preset or configuration, or of the given options."""
    check_not_quantized(config)
    check_not_joint(config)
    if config.thresholds is not None:
        raise ValueError(
            f"thresholds={config.thresholds}: tokens below a threshold are skipped, and new ones "
            "could not learn; grow the dense model"
        )
    if (to is None) == (not tokens):
        raise ValueError(
            "give either a size to grow to, such as to='354m', or token counts (ffn_tokens=512)"
        )
    if to is None:
        to = resized_config(config, tokens)
    elif isinstance(to, str):
        to = type(config).from_preset(to)
    for name in FIXED:
        before, after = getattr(config, name), getattr(to, name)
        if before != after:
            raise ValueError(
                f"growth adds tokens; it cannot change {name} from {before} to {after}"
            )
    before, after = token_counts(config), token_counts(to)
    for (projection, layer), size in after.items():
        if size < before[projection, layer]:
            raise ValueError(
                f"{projection} of layer {layer} has {before[projection, layer]} tokens, more than "
                f"{size}; growth cannot shrink a model, tokenformer.prune can"
            )
    return after


class KeptCount(NamedTuple):
    """How much of a projection pruning keeps."""

    number: int
    """Tokens, or groups of a routed projection."""
    last: bool | None = None
    """Whether the last group of a routed projection, which may be smaller, stays; None if its
    contribution decides."""


def kept_counts(
    config: TokenConfig, keep: float | None, tokens: Mapping[str, Tokens]
) -> dict[LayerProjection, KeptCount]:
    """Return how much to keep of every projection: a share, or the token counts of the options."""
    if (keep is None) == (not tokens):
        raise ValueError("give either a share to keep or token counts, such as ffn_tokens")
    before = token_counts(config)
    if keep is not None:
        check_share("keep", keep)
        units = {
            place: size if config.active(*place) is None else config.groups(*place)
            for place, size in before.items()
        }
        return {place: KeptCount(token_share(count, keep)) for place, count in units.items()}
    after = token_counts(resized_config(config, tokens))
    for (projection, layer), size in after.items():
        if size > before[projection, layer]:
            raise ValueError(
                f"{projection} of layer {layer} has {before[projection, layer]} tokens, fewer than "
                f"{size}; pruning cannot enlarge a model, tokenformer.grow can"
            )
    return {
        place: KeptCount(size)
        if config.active(*place) is None
        else whole_groups(*place, before[place], size, config.group_size)
        for place, size in after.items()
    }


def whole_groups(
    projection: str, layer: int, before: int, after: int, group_size: int
) -> KeptCount:
    """Return how many groups of `before` tokens are kept so that `after` tokens are."""
    rest = before % group_size
    if after % group_size not in (0, rest):
        fewer = max(after // group_size, 1) * group_size
        raise ValueError(
            f"{projection} of layer {layer} is routed and loses whole groups of group_size="
            f"{group_size}, so it cannot have {after} tokens; "
            f"use {fewer} or {min(fewer + group_size, before)}"
        )
    return KeptCount(-(-after // group_size), after % group_size == rest if rest else None)


def resized_config(config: TokenConfig, tokens: Mapping[str, Tokens]) -> TokenConfig:
    """Return `config` with the given token counts, default scales and rates, and no routing."""
    for name in tokens:
        if name not in TOKEN_OPTIONS:
            raise ValueError(f"{name!r} is not an option; choose from {', '.join(TOKEN_OPTIONS)}")
    options: dict[str, Any] = config.to_dict() | dict.fromkeys(
        ("scale_tokens", "token_rates", "token_ages", "active_groups")
    )
    if "qkv_tokens" in tokens:  # replaces q_tokens, k_tokens and v_tokens, unless given too
        options |= {"q_tokens": None, "k_tokens": None, "v_tokens": None}
    return type(config).from_dict(options | dict(tokens))


def check_share(name: str, share: float) -> None:
    if not 0 < share <= 1:
        raise ValueError(f"{name}={share} must be above 0 and at most 1")


def token_share(size: int, share: float) -> int:
    """Return a share of a token count, rounded up; robust to float error: 0.1 of 30 is 3."""
    check_share("share", share)
    return max(1, math.ceil(round(size * share, 6)))


def config_with_tokens(
    config: TokenConfig,
    sizes: TokenCounts,
    scales: Mapping[LayerProjection, float] | None = None,
    *,
    learned_scale: bool = False,
    rates: Mapping[LayerProjection, list[float]] | None = None,
    ages: Mapping[LayerProjection, list[int]] | None = None,
    active_groups: Mapping[LayerProjection, int] | None = None,
) -> TokenConfig:
    """Return `config` with other token counts, scales, learning rate factors, ages and active
    groups."""
    if isinstance(config, TokenformerImageTextConfig) and config.is_joined:
        return joint_config(config, sizes, rates or {}, ages or {})
    depth = config.num_hidden_layers
    options = config.to_dict() | count_options(sizes, scales or {}, depth)
    options["learned_scale"] = learned_scale
    options["token_rates"] = rows_by_layer(rates or {}, depth, usual=1)
    options["token_ages"] = rows_by_layer(ages or {}, depth, usual=0)
    options["active_groups"] = group_options(config, active_groups or {})
    return type(config).from_dict(options)


def group_options(
    config: TokenConfig, changed: Mapping[LayerProjection, int]
) -> dict[str, Any] | None:
    """Return the option `active_groups` with other numbers for some projections."""
    found: dict[str, Any] = dict(config.active_groups or {})
    for projection in found:
        layers = range(config.num_hidden_layers)
        before = [config.active(projection, layer) for layer in layers]
        after = [changed.get((projection, layer), before[layer]) for layer in layers]
        if after != before:
            found[projection] = collapse_equal(after)
    return found or None


def count_options(
    sizes: TokenCounts, scales: Mapping[LayerProjection, float], depth: int
) -> dict[str, Any]:
    """Return the options of a configuration with these token counts and scales."""
    layers = range(depth)
    counts = {p: collapse_equal([sizes[p, layer] for layer in layers]) for p in PROJECTIONS}
    options: dict[str, Any] = {"output_tokens": counts["o"], "ffn_tokens": counts["ffn"]}
    same = counts["q"] == counts["k"] == counts["v"]
    options["qkv_tokens"] = counts["q"]
    for projection in "qkv":
        options[f"{projection}_tokens"] = None if same else counts[projection]
    own = {p: [explicit_scale(p, layer, sizes, scales) for layer in layers] for p in PROJECTIONS}
    own = {p: values for p, values in own.items() if any(v is not None for v in values)}
    return options | {"scale_tokens": own or None}


def joint_config(
    config: TokenformerImageTextConfig,
    sizes: TokenCounts,
    rates: Mapping[LayerProjection, list[float]],
    ages: Mapping[LayerProjection, list[int]],
) -> TokenConfig:
    """Return `config` with other numbers of new tokens, so that the layers have `sizes`."""
    new = {
        place: size - config.tokens(*place) + config.parts(*place)[1]
        for place, size in sizes.items()
    }
    depth = config.num_hidden_layers
    options = config.to_dict() | {"new_tokens": new_tokens_option(new, depth)}
    options["token_rates"] = rows_by_layer(rates, depth, usual=1)
    options["token_ages"] = rows_by_layer(ages, depth, usual=0)
    return type(config).from_dict(options)


def new_tokens_option(counts: TokenCounts, depth: int) -> int | dict[str, Tokens]:
    """Return the option `new_tokens` of a vision-language model: one number if all are equal."""
    if len(equal := set(counts.values())) == 1:
        return equal.pop()
    return {p: collapse_equal([counts[p, layer] for layer in range(depth)]) for p in PROJECTIONS}


def rows_by_layer(
    rows: Mapping[LayerProjection, list[Any]], layers: int, usual: int
) -> dict[str, list[Any]] | None:
    """Return the run lengths of one value per token by projection and layer, without the layers
    whose values are all `usual`."""
    own = {place: run_lengths(values) for place, values in rows.items() if set(values) != {usual}}
    projections = [p for p in PROJECTIONS if any(place[0] == p for place in own)]
    return {p: [own.get((p, layer)) for layer in range(layers)] for p in projections} or None


def collapse_equal(counts: list[Count]) -> Count | list[Count]:
    return counts[0] if len(set(counts)) == 1 else counts


def explicit_scale(
    projection: str, layer: int, sizes: TokenCounts, scales: Mapping[LayerProjection, float]
) -> float | None:
    """Return the scale of a projection, or None if it equals the token count."""
    scale = scales.get((projection, layer))
    return None if scale == sizes[projection, layer] else scale


def run_lengths(values: list[Any]) -> list[list[Any]]:
    """Return the run-length encoding: [0, 0, 1] gives [[2, 0], [1, 1]]."""
    return [[len([*group]), value] for value, group in groupby(values)]
