"""Routed pattention: every row attends to the tokens of its own groups and skips the others.

The tokens are in groups of `group_size` consecutive ones; the last group may be smaller. With the
weights of theta and the set C of tokens in the groups of a row,

    routed(x) = sum over C of gate * theta(x K^T) V

theta divides by a norm over the scores, either over all tokens (`norm="all"`) or over C
(`norm="chosen"`). For l2_gelu the norm over all tokens comes from the Gram matrix of the keys, so
it is exact without the scores of the tokens that are skipped. The other thetas have no such
identity and take the norm over C.

`added` tokens, those of adapters, are attended to by every row: their scores are in the norm, and
they have no gates.

`reference` computes all scores and masks them; every other backend is tested against it.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tokenformer.ops.added_tokens import added_scores, weighted_sum
from tokenformer.ops.backends.auto import is_plain
from tokenformer.ops.backends.grouped import run_grouped
from tokenformer.ops.pattention import check_inputs, check_names, check_scale
from tokenformer.ops.theta import ThetaOptions

NORMS = ("all", "chosen")
ROUTED_BACKENDS = ("reference", "grouped")


def routed_pattention(
    x: Tensor,
    key_tokens: Tensor,
    value_tokens: Tensor,
    groups: Tensor,
    *,
    group_size: int,
    norm: str = "all",
    gates: Tensor | None = None,
    added: tuple[Tensor, Tensor] | None = None,
    scale_tokens: float | Tensor | None = None,
    theta: str = "l2_gelu",
    approximate: str = "none",
    eps: float = 0.0,
    gram_root: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attend from every row of `x` to the parameter tokens of its groups.

    Args:
        x: input rows `[..., d_in]`.
        key_tokens: `[n, d_in]`.
        value_tokens: `[n, d_out]`.
        groups: indices of the groups of every row, `[..., k]`, in any order and without repetition
            within a row. With k = 0 the output is zero.
        group_size: tokens per group.
        norm: `all`, the norm over the scores of all tokens, for `l2_gelu` only; or `chosen`, over
            those of the row's groups. With all groups chosen both are `pattention`.
        gates: a factor for the weights of every group, `[..., k]`; by default 1.
        added: keys `[m, d_in]` and values `[m, d_out]` of tokens that every row attends to, or
            `[B, m, ...]` for others in every sample of x `[B, ..., d_in]`.
        scale_tokens: as in `pattention`; by default the token count n.
        theta, approximate, eps: as in `pattention`.
        gram_root: `exact_gram_root(key_tokens)`, computed once where the keys stay the same.
            Gradients of the keys do not pass through it.
        backend: `auto`, `reference` or `grouped`.

    Returns:
        `[..., d_out]`, in the dtype of the inputs.
    """
    check_inputs(x, key_tokens, value_tokens)
    check_names(theta, approximate)
    check_norm(norm, theta)
    _check_groups(x, key_tokens, groups, group_size, gates)
    if backend not in ("auto", *ROUTED_BACKENDS):
        raise ValueError(
            f"backend={backend!r} is unknown; choose auto, {', '.join(ROUTED_BACKENDS)}"
        )
    if scale_tokens is None:
        scale_tokens = float(key_tokens.shape[0])
    else:
        check_scale(scale_tokens)
    if isinstance(scale_tokens, Tensor):
        scale_tokens = scale_tokens.reshape(())
    options = ThetaOptions(theta, scale_tokens, approximate, eps)
    if backend == "auto":
        supported = torch.compiler.is_compiling() or is_plain(x, key_tokens, value_tokens, groups)
        backend = "grouped" if supported else "reference"
    scores = None if added is None else added_scores(x, added[0])  # [..., m]
    given = x, key_tokens, value_tokens, groups, gates, scores, options, group_size, norm
    if backend == "reference":
        out, weights = reference(*given)
    else:
        out, weights = run_grouped(*given, gram_root)
    return out if added is None or weights is None else out + weighted_sum(weights, added[1])


def reference(
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    groups: Tensor,
    gates: Tensor | None,
    added: Tensor | None,
    options: ThetaOptions,
    group_size: int,
    norm: str,
) -> tuple[Tensor, Tensor | None]:
    """Return the output without added tokens and, given their scores [..., m], their weights."""
    scores = x @ keys.T  # [..., n]
    found = dense_weights(scores, groups, gates, added, options, group_size, norm)
    out = found.weights.to(scores.dtype) @ values  # [..., d_out]
    return out, None if added is None else found.added.to(scores.dtype)


class DenseWeights(NamedTuple):
    """The weights of all tokens, zero for those that a row skips."""

    scores: Tensor  # [..., n], as they enter the norm
    ungated: Tensor  # [..., n]
    weights: Tensor  # [..., n]
    added: Tensor  # [..., m]


def dense_weights(
    scores: Tensor,
    groups: Tensor,
    gates: Tensor | None,
    added: Tensor | None,
    options: ThetaOptions,
    group_size: int,
    norm: str,
) -> DenseWeights:
    """Return the weights of all tokens, given the scores [..., n] of all of them."""
    n, count = scores.shape[-1], -(-scores.shape[-1] // group_size)
    if gates is None:
        gates = torch.ones_like(groups, dtype=scores.dtype)
    chosen = group_mask(groups, n, group_size)  # [..., n]
    by_group = scores.new_zeros(*scores.shape[:-1], count)
    gate = by_group.scatter(-1, groups, gates.to(scores.dtype)).repeat_interleave(group_size, -1)
    if norm == "chosen":  # a score of zero has no weight, except for softmax
        scores = scores.masked_fill(~chosen, -math.inf if options.theta == "softmax" else 0.0)
    if added is None:
        added = scores[..., :0]
    if not groups.shape[-1] and not added.shape[-1]:  # softmax would divide by zero
        none = scores.masked_fill(~chosen, 0.0) * 0
        return DenseWeights(scores, none, none, added)
    weights = options.weights(torch.cat([scores, added], dim=-1))
    ungated = weights[..., :n].masked_fill(~chosen, 0.0)
    return DenseWeights(scores, ungated, ungated * gate[..., :n], weights[..., n:])


def group_mask(groups: Tensor, tokens: int, group_size: int) -> Tensor:
    """Return a mask [..., tokens] of the tokens in the groups [..., k] of every row."""
    count = -(-tokens // group_size)
    chosen = torch.zeros(*groups.shape[:-1], count, dtype=torch.bool, device=groups.device)
    return chosen.scatter(-1, groups, True).repeat_interleave(group_size, -1)[..., :tokens]


def check_norm(norm: str, theta: str) -> None:
    if norm not in NORMS:
        raise ValueError(f"norm={norm!r} is unknown; choose one of {', '.join(NORMS)}")
    if norm == "all" and theta != "l2_gelu":
        raise ValueError(
            f"norm='all' with theta={theta!r} would need the scores of all tokens; use "
            "norm='chosen', or theta='l2_gelu', whose norm comes from the Gram matrix of the keys"
        )


def _check_groups(
    x: Tensor, keys: Tensor, groups: Tensor, group_size: int, gates: Tensor | None
) -> None:
    if group_size < 1:
        raise ValueError(f"group_size={group_size} must be at least 1")
    if groups.dtype != torch.int64:
        raise TypeError(f"groups must be indices of dtype int64, got {groups.dtype}")
    count = -(-keys.shape[0] // group_size)
    if groups.shape[:-1] != x.shape[:-1] or groups.shape[-1] > count:
        raise ValueError(
            f"groups {tuple(groups.shape)} must be {(*x.shape[:-1], 'k')} with k at most {count}, "
            f"the groups of {keys.shape[0]} tokens"
        )
    if gates is not None and gates.shape != groups.shape:
        raise ValueError(
            f"gates {tuple(gates.shape)} must have the shape of groups, {tuple(groups.shape)}"
        )
