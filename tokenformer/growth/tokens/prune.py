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
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tokenformer.growth.growth_report import GrowthReport
from tokenformer.growth.model_from_tensors import ModelT
from tokenformer.growth.tokens.joint_prune import prune_joint
from tokenformer.growth.tokens.prefix import active_share
from tokenformer.growth.tokens.refit import refit_values
from tokenformer.growth.tokens.rewrite import replace_tokens
from tokenformer.growth.tokens.token_counts import TokenCounts, pruned_token_counts
from tokenformer.growth.tokens.token_set import (
    Replacement,
    TokenSet,
    check_tokenformer,
    token_layers,
)
from tokenformer.growth.tokens.token_usage import (
    idle_tokens,
    kept_share,
    rows_to_keep,
    token_statistics,
)
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

    With neither `keep` nor token counts, only the tokens with zero keys are dropped.

    Args:
        model: a TokenFormer; it is not changed.
        batches: token ids [B, T] or images [B, C, H, W] like those the model is used on, with many
            more rows than a layer keeps tokens. Required to drop tokens other than zero keys. Of a
            vision-language model, what its processor returns.
        keep: the share of every layer's tokens to keep, rounded up.
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
    check_tokenformer(model, "can be pruned")
    if parts is not None:
        raise ValueError(f"parts={parts} is for a vision-language model; leave it out")
    idle = {name: idle_tokens(module) for name, (_, module) in token_layers(model).items()}
    if keep is None and not tokens:
        sizes = counts_without_idle(model, idle)
    else:
        sizes = pruned_token_counts(model.config, keep, tokens)
    counts = {name: sizes[projection] for name, (projection, _) in token_layers(model).items()}
    losing = [name for name, count in counts.items() if len(idle[name]) - count > idle[name].sum()]
    if not losing:
        kept = {name: rows_to_keep(count, idle[name]) for name, count in counts.items()}
        return keep_tokens(model, kept, {}, scale="frozen")
    if batches is None:
        raise ValueError(missing_batches(losing[0], counts, idle))
    batches = list(batches)  # needed twice
    found = token_statistics(model, batches)
    kept = {
        name: rows_to_keep(count, idle[name], found[name].contribution)
        for name, count in counts.items()
    }
    shares = {name: found[name].share for name in losing}
    return keep_tokens(model, kept, shares, batches if refit else None, scale=scale)


def keep_tokens(
    model: ModelT,
    kept: Mapping[str, Tensor],
    shares: Mapping[str, Tensor],
    batches: list[Tensor] | None = None,
    *,
    scale: str = "measured",
) -> tuple[ModelT, GrowthReport]:
    """Return `model` with only the given rows of every layer, and a report.

    Args:
        kept: rows to keep, by layer name.
        shares: each token's share of the norm [n], for layers that lose tokens that are not idle.
        batches: data to refit the values of those layers on; None keeps the values.
        scale: `measured` or `frozen`.
    """
    tokens = {}
    for name, (_, module) in token_layers(model).items():
        before, rows = TokenSet.of(module), kept[name].to(module.key_tokens.device)
        share = kept_share(shares[name], kept[name]) if name in shares else 1.0
        factor = share if scale == "measured" else 1.0
        tokens[name] = TokenSet(before.keys[rows], before.values[rows], before.scale * factor)
    if batches is not None:
        # Frozen tokens keep their values.
        frozen = [
            n
            for n, (p, _) in token_layers(model).items()
            if 0 in (model.config.row_rates(*p) or [])
        ]
        losing = {name: tokens[name] for name in shares if name not in frozen}
        for name, values in refit_values(model, losing, batches).items():
            tokens[name] = replace(tokens[name], values=values)
    replacements = {name: Replacement(tokens[name], rows) for name, rows in kept.items()}
    with active_share(model, None):  # the report compares with the whole model
        return replace_tokens(model, replacements, method="prune", scale=scale, exact=not shares)


def counts_without_idle(model: nn.Module, idle: Mapping[str, Tensor]) -> TokenCounts:
    """Return the token counts without idle tokens, at least 1 per layer."""
    return {
        projection: max(1, int((~idle[name]).sum()))
        for name, (projection, _) in token_layers(model).items()
    }


def missing_batches(name: str, counts: Mapping[str, int], idle: Mapping[str, Tensor]) -> str:
    lost, droppable = len(idle[name]) - counts[name], int(idle[name].sum())
    return (
        "batches is missing: without data only unused tokens (zero keys) can be removed, and "
        f"{name} has {droppable} of them, not {lost}"
    )
