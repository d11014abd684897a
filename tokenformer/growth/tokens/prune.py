"""Dropping the tokens that matter least: a trained TokenFormer becomes a smaller one.

    smaller, report = tokenformer.prune(model, batches, keep=0.5)
    smaller, report = tokenformer.prune(model)      # the tokens with zero keys alone: exact

What a token matters is measured: the mean square of what it adds to its layer's output, on data
(`statistics`). But a dropped token also leaves the norm that all scores are divided by, whatever
its value was, and every weight that is left would grow. So the scale shrinks by the share of the
norm that the kept tokens hold, measured on the same data: for l2_gelu

    s' = s mean( ||A_kept||^2 / ||A||^2 )

and the values that are left are fitted to make up for those that are gone (`refit`).

A token with a zero key has no score, no weight and no part in the norm, except in a softmax. Such
tokens go first; dropping them is exact, leaves the scale alone and needs no data.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tokenformer.growth.growth_report import GrowthReport
from tokenformer.growth.tokens.prefix import active_share
from tokenformer.growth.tokens.refit import refitted
from tokenformer.growth.tokens.rewrite import replace_tokens
from tokenformer.growth.tokens.token_counts import Sizes, pruned_sizes
from tokenformer.growth.tokens.token_set import (
    Replacement,
    TokenSet,
    check_tokenformer,
    token_layers,
)
from tokenformer.growth.tokens.token_usage import token_statistics
from tokenformer.layers.pattention import Pattention
from tokenformer.models.configuration import Tokens

SCALES = ("measured", "frozen")


@torch.no_grad()
def prune(
    model: Any,
    batches: Iterable[Tensor] | None = None,
    *,
    keep: float | None = None,
    scale: str = "measured",
    refit: bool = True,
    **tokens: Tokens,
) -> tuple[Any, GrowthReport]:
    """A smaller model that does what `model` does as nearly as it can, and a report.

    `model` itself is left alone. With neither `keep` nor numbers of tokens, the tokens with zero
    keys are dropped, and nothing else.

    Args:
        model: a TokenFormer, grown before or not.
        batches: token ids [B, T], or images [B, C, H, W], such as the model is used on; better many
            times more rows than a layer keeps tokens. Needed where more is to go than tokens with
            zero keys.
        keep: the share of every layer's tokens to keep, rounded up.
        scale: `measured`, as above, or `frozen`, left as it was.
        refit: whether the kept tokens' values are fitted to make up for the others.
        **tokens: instead of `keep`, any of qkv_tokens, output_tokens, ffn_tokens, q_tokens,
            k_tokens and v_tokens: an int, or one per layer.
    """
    check_tokenformer(model, "can be pruned")
    if scale not in SCALES:
        raise ValueError(f"scale={scale!r} is unknown; choose one of {', '.join(SCALES)}")
    idle = {name: idle_tokens(module) for name, (_, module) in token_layers(model).items()}
    if keep is None and not tokens:
        sizes = sizes_without(model, idle)
    else:
        sizes = pruned_sizes(model.config, keep, tokens)
    counts = {name: sizes[place] for name, (place, _) in token_layers(model).items()}
    losing = [name for name, count in counts.items() if len(idle[name]) - count > idle[name].sum()]
    if not losing:
        kept = {name: best(count, idle[name]) for name, count in counts.items()}
        return keep_tokens(model, kept, {}, scale="frozen")
    if batches is None:
        raise ValueError(need_of_data(losing[0], counts, idle))
    batches = list(batches)  # read twice
    found = token_statistics(model, batches)
    kept = {
        name: best(count, idle[name], found[name].contribution) for name, count in counts.items()
    }
    shares = {name: found[name].share for name in losing}
    return keep_tokens(model, kept, shares, batches if refit else None, scale=scale)


def keep_tokens(
    model: Any,
    kept: Mapping[str, Tensor],
    shares: Mapping[str, Tensor],
    batches: list[Tensor] | None = None,
    *,
    scale: str = "measured",
) -> tuple[Any, GrowthReport]:
    """`model` with these rows of every layer, and a report.

    Args:
        kept: rows by the names of the layers.
        shares: the tokens' shares of the norm [n], of the layers that lose tokens that have one.
        batches: to fit those layers' values to; by default they stay.
        scale: `measured` or `frozen`.
    """
    tokens = {}
    for name, (_, module) in token_layers(model).items():
        before, rows = TokenSet.of(module), kept[name].to(module.key_tokens.device)
        share = kept_share(shares[name], kept[name]) if name in shares else 1.0
        factor = share if scale == "measured" else 1.0
        tokens[name] = TokenSet(before.keys[rows], before.values[rows], before.scale * factor)
    if batches is not None:
        # The values of frozen tokens are not to be touched.
        frozen = [
            n
            for n, (p, _) in token_layers(model).items()
            if 0 in (model.config.row_rates(*p) or [])
        ]
        losing = {name: tokens[name] for name in shares if name not in frozen}
        for name, values in refitted(model, losing, batches).items():
            tokens[name] = replace(tokens[name], values=values)
    replacements = {name: Replacement(tokens[name], rows) for name, rows in kept.items()}
    with active_share(model, None):  # the report compares with the whole model
        return replace_tokens(model, replacements, method="prune", scale=scale, exact=not shares)


def kept_share(share: Tensor, rows: Tensor) -> float:
    """What these rows hold of the norm; exactly 1 where the others hold none."""
    gone = torch.ones(len(share), dtype=torch.bool)
    gone[rows] = False
    held, lost = share[rows].sum().item(), share[gone].sum().item()
    return held / (held + lost) if held > 0 else 1.0  # a scale is positive


def best(count: int, idle: Tensor, contribution: Tensor | None = None) -> Tensor:
    """The rows to keep, in their order: those that add most, idle ones last, else the first."""
    worth = torch.zeros(len(idle), dtype=torch.float64)
    if contribution is not None:
        worth = contribution.clone()
    worth[idle] = -1.0
    return worth.argsort(descending=True, stable=True)[:count].sort().values


def idle_tokens(module: Pattention) -> Tensor:
    """Which tokens can be dropped unseen. [n]"""
    if module.theta == "softmax":  # where a zero key still has the weight of exp(0)
        return torch.zeros(module.num_tokens, dtype=torch.bool)
    return (module.key_tokens == 0).all(1).cpu()


def sizes_without(model: Any, idle: Mapping[str, Tensor]) -> Sizes:
    """What is left of every layer without its idle tokens: one token at least."""
    return {
        place: max(1, int((~idle[name]).sum())) for name, (place, _) in token_layers(model).items()
    }


def need_of_data(name: str, counts: Mapping[str, int], idle: Mapping[str, Tensor]) -> str:
    lost, unseen = len(idle[name]) - counts[name], int(idle[name].sum())
    return (
        f"batches is missing: {name} is to lose {lost} tokens, of which {unseen} have zero keys "
        "and can go unseen; which others matter least is measured on data"
    )
