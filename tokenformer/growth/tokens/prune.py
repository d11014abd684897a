"""Pruning a TokenFormer: dropping the tokens that matter least.

    smaller, report = tokenformer.prune(model, batches, keep=0.5)
    smaller, report = tokenformer.prune(model)      # drop only tokens with zero keys: exact

A token's importance is its contribution: the mean square of what it adds to its layer's output on
data (`token_usage`). Dropping a token also removes it from the norm that divides all scores, which
would increase the remaining weights. So the scale is multiplied by the kept tokens' share of the
norm, measured on the same data. For l2_gelu:

    s' = s mean( ||A_kept||^2 / ||A||^2 )

Then the kept values are fitted to compensate for the dropped ones (`refit`).

Tokens with zero keys are idle, except with softmax: they have no score, no weight and no share of
the norm. They are dropped first, which is exact, keeps the scale and needs no data.

A routed layer loses whole groups, those that contribute least (`group_usage`), and its router their
outputs. A row then chooses as many groups as before, or all that are left. With theta_norm `all`
the scale changes as above; with `chosen` by the norms of what a row chooses after and before. Which
groups are idle is known only from data: those that no row chooses and, with `all`, whose keys are
zero. If all groups are active, groups of zero keys are idle without data.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tokenformer.growth.growth_report import GrowthReport
from tokenformer.growth.model_from_tensors import ModelT
from tokenformer.growth.parameter_mapping import ParameterMapping
from tokenformer.growth.tokens.group_usage import (
    GroupStatistics,
    GroupUsageSums,
    KeptGroups,
    NormShare,
    idle_groups,
)
from tokenformer.growth.tokens.joint_prune import prune_joint
from tokenformer.growth.tokens.prefix import active_share
from tokenformer.growth.tokens.refit import refit_values
from tokenformer.growth.tokens.rewrite import copy_tensor, replace_tokens
from tokenformer.growth.tokens.token_counts import KeptCount, kept_counts
from tokenformer.growth.tokens.token_set import (
    Replacement,
    TokenSet,
    check_tokenformer,
    token_layers,
)
from tokenformer.growth.tokens.token_usage import (
    TokenStatistics,
    UsageSums,
    idle_tokens,
    kept_share,
    observe_inputs,
    rows_to_keep,
)
from tokenformer.layers.pattention import Pattention
from tokenformer.layers.routed_pattention import RoutedPattention
from tokenformer.models.configuration import Tokens
from tokenformer.models.image_text_configuration import TokenformerImageTextConfig

SCALE_POLICIES = ("measured", "frozen")


@torch.no_grad()
def prune(
    model: ModelT,
    batches: Iterable[Any] | None = None,
    *,
    keep: float | None = None,
    parts: Sequence[str] | None = None,
    scale: str = "measured",
    refit: bool = True,
    **tokens: Tokens,
) -> tuple[ModelT, GrowthReport]:
    """Return a smaller model that approximates `model`, and a report.

    With neither `keep` nor token counts, only what is idle is dropped: tokens with zero keys and,
    if there are batches, groups that none of their rows chooses.

    Args:
        model: a TokenFormer; it is not changed.
        batches: token ids [B, T] or images [B, C, H, W] like those the model is used on, with many
            more rows than a layer keeps tokens. Required to drop tokens other than zero keys. Of a
            vision-language model, what its processor returns.
        keep: the share of every layer's tokens to keep, rounded up; of a routed layer the share of
            its groups.
        parts: for a vision-language model, which of its tokens to drop, any of `vision`, `new` and
            `language`; by default all. See `joint_prune`.
        scale: `measured`, as above, or `frozen`, unchanged.
        refit: whether to fit the kept tokens' values to compensate for the dropped ones.
        **tokens: instead of `keep`, any of qkv_tokens, output_tokens, ffn_tokens, q_tokens,
            k_tokens and v_tokens: an int, or one per layer.
    """
    if scale not in SCALE_POLICIES:
        raise ValueError(f"scale={scale!r} is unknown; choose one of {', '.join(SCALE_POLICIES)}")
    if isinstance(getattr(model, "config", None), TokenformerImageTextConfig):
        if tokens:
            raise ValueError(
                f"a vision-language model is pruned by keep and parts, not by {', '.join(tokens)}"
            )
        return prune_joint(model, batches, keep=keep, parts=parts, scale=scale, refit=refit)
    check_tokenformer(model, "can be pruned", routed=True)
    if parts is not None:
        raise ValueError(f"parts={parts} is for a vision-language model; leave it out")
    layers = token_layers(model)
    idle = {name: idle_units(module) for name, (_, module) in layers.items()}
    counts: dict[str, KeptCount] = {}
    if keep is not None or tokens:
        sizes = kept_counts(model.config, keep, tokens)
        counts = {name: sizes[place] for name, (place, _) in layers.items()}
    kept = units_to_keep(counts, idle, {})
    losing = losing_layers(kept, idle)
    if losing and batches is None:
        raise ValueError(missing_batches(losing[0], layers[losing[0]][1], kept, idle))
    if batches is None or not (losing or has_routed_layers(model)):
        return keep_tokens(model, kept, {}, scale="frozen", exact=True)
    batches = list(batches)  # needed several times
    found = usage_statistics(model, batches)
    is_sure = True
    for name, usage in found.items():
        if isinstance(usage, GroupStatistics) and (usage.idle & ~idle[name]).any():
            idle[name], is_sure = idle[name] | usage.idle, False
    kept = units_to_keep(counts, idle, found)
    losing = losing_layers(kept, idle)
    groups = kept_groups(model, {name: kept[name] for name in losing})
    shares: dict[str, Tensor | float] = {
        name: usage.share
        for name, usage in found.items()
        if name in losing and isinstance(usage, TokenStatistics)
    }
    shares |= norm_shares(model, groups, batches)
    return keep_tokens(
        model,
        kept,
        shares,
        batches if refit and losing else None,
        scale=scale if losing else "frozen",
        exact=False if losing else True if is_sure else None,
    )


def keep_tokens(
    model: ModelT,
    kept: Mapping[str, Tensor],
    shares: Mapping[str, Tensor | float],
    batches: list[Tensor] | None = None,
    *,
    scale: str = "measured",
    exact: bool | None = False,
) -> tuple[ModelT, GrowthReport]:
    """Return `model` with only the given tokens of every layer, and a report.

    Args:
        kept: tokens to keep, or groups of a routed layer, by layer name.
        shares: for layers that lose tokens that are not idle, each token's share of the norm [n],
            or the share of the norm that is left.
        batches: data to refit the values of those layers on; None keeps the values.
        scale: `measured` or `frozen`.
        exact: of the report.
    """
    tokens, rows = {}, dict(kept)
    groups = kept_groups(model, kept)
    for name, (_, module) in token_layers(model).items():
        share = shares.get(name, 1.0) if scale == "measured" else 1.0
        factor = kept_share(share, kept[name]) if isinstance(share, Tensor) else share
        before = TokenSet.of(module)
        after = before.scale * factor
        if name in groups:
            rows[name], after = groups[name].rows, groups[name].scale(factor)
        at = rows[name].to(before.keys.device)
        tokens[name] = TokenSet(before.keys[at], before.values[at], after)
    if batches is not None:
        # Frozen tokens keep their values.
        frozen = [
            n
            for n, (p, _) in token_layers(model).items()
            if 0 in (model.config.row_rates(*p) or [])
        ]
        losing = {name: tokens[name] for name in shares if name not in frozen}
        for name, values in refit_values(model, losing, batches, groups).items():
            tokens[name] = replace(tokens[name], values=values)
    replacements = {
        name: Replacement(
            tokens[name],
            rows[name],
            active_groups=groups[name].active_groups if name in groups else None,
        )
        for name in kept
    }

    def copy(name: str, tensor: Tensor) -> tuple[Tensor, ParameterMapping]:
        layer = name.rpartition(".router.")[0]
        if layer not in groups:
            return copy_tensor(name, tensor)
        index = groups[layer].groups
        return tensor[index.to(tensor.device)], ParameterMapping(name, index)

    with active_share(model, None):  # the report compares with the whole model
        return replace_tokens(
            model, replacements, method="prune", scale=scale, exact=exact, copy=copy
        )


def units_to_keep(
    counts: Mapping[str, KeptCount],
    idle: Mapping[str, Tensor],
    found: Mapping[str, TokenStatistics | GroupStatistics],
) -> dict[str, Tensor]:
    """Return the tokens to keep of every layer, or the groups of a routed one; without `counts` all
    that are not idle, at least 1."""
    kept = {}
    for name, mask in idle.items():
        worth = found[name].contribution if name in found else torch.zeros(len(mask)).double()
        count, last = counts.get(name) or KeptCount(max(1, int((~mask).sum())))
        if last is None:
            kept[name] = rows_to_keep(count, mask, worth)
            continue
        kept[name] = rows_to_keep(count - last, mask[:-1], worth[:-1])
        if last:
            kept[name] = torch.cat([kept[name], torch.tensor([len(mask) - 1])])
    return kept


def losing_layers(kept: Mapping[str, Tensor], idle: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the layers that lose tokens or groups that are not idle."""
    losing = []
    for name, mask in idle.items():
        used = ~mask
        used[kept[name]] = False
        if used.any():
            losing.append(name)
    return losing


def idle_units(module: Pattention) -> Tensor:
    """Return a mask of the tokens, or the groups of a routed layer, that can go without changing
    any output."""
    return idle_groups(module) if isinstance(module, RoutedPattention) else idle_tokens(module)


def has_routed_layers(model: nn.Module) -> bool:
    return any(isinstance(module, RoutedPattention) for _, module in token_layers(model).values())


def kept_groups(model: nn.Module, kept: Mapping[str, Tensor]) -> dict[str, KeptGroups]:
    """Return the routed ones of the given layers."""
    return {
        name: KeptGroups(module, kept[name])
        for name, (_, module) in token_layers(model).items()
        if name in kept and isinstance(module, RoutedPattention)
    }


def usage_statistics(
    model: nn.Module, batches: list[Any]
) -> dict[str, TokenStatistics | GroupStatistics]:
    """Return the statistics of every layer by name."""
    sums: dict[str, UsageSums | GroupUsageSums] = {
        name: GroupUsageSums(module) if isinstance(module, RoutedPattention) else UsageSums(module)
        for name, (_, module) in token_layers(model).items()
    }
    observe_inputs(model, batches, {name: layer.add for name, layer in sums.items()})
    return {name: layer.result() for name, layer in sums.items()}


def norm_shares(
    model: nn.Module, groups: Mapping[str, KeptGroups], batches: list[Any]
) -> dict[str, float]:
    """Return the share of the norm that is left of every routed layer."""
    if not groups:
        return {}
    sums = {name: NormShare(each) for name, each in groups.items()}
    observe_inputs(model, batches, {name: each.add for name, each in sums.items()})
    return {name: each.result() for name, each in sums.items()}


def missing_batches(
    name: str, module: Pattention, kept: Mapping[str, Tensor], idle: Mapping[str, Tensor]
) -> str:
    lost, droppable = len(idle[name]) - len(kept[name]), int(idle[name].sum())
    if isinstance(module, RoutedPattention):
        return (
            f"batches is missing: {name} is routed, and only data show which {lost} of its "
            f"{module.num_groups} groups contribute least"
        )
    return (
        "batches is missing: without data only unused tokens (zero keys) can be removed, and "
        f"{name} has {droppable} of them, not {lost}"
    )
