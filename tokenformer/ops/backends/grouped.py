"""Routed pattention by sorting: the rows of a group are multiplied with its tokens at once.

The pairs of a row and one of its groups are sorted by group. Per group there is one product with
its keys and one with its values, so that a row visits only the tokens of its groups. Between the
two, the scores of a row's groups lie side by side, [R, k * group_size], where theta is computed as
in `direct`. The backward pass is written by hand and saves only these scores.

Scores of added tokens, which every row attends to, are further columns, [R, k * group_size + m]:
they are in the same norm, and their weights are returned.

Both directions are registered operators, so torch.compile does not unroll the loop over groups.
A few rows without gradients on a CPU, as in decoding, are `native.routed`'s.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenformer.ops.backends.autograd import as_rows, autocast, no_autocast, with_leading
from tokenformer.ops.backends.derivatives import (
    DERIVATIVES,
    BackwardBlock,
    L2Gelu,
    ThetaDerivative,
    cached_rows,
)
from tokenformer.ops.backends.direct import has_slow_products
from tokenformer.ops.backends.interface import is_trained
from tokenformer.ops.backends.native import routed, supports
from tokenformer.ops.backends.score_norm import score_norms
from tokenformer.ops.theta import ThetaOptions, accumulation_dtype, zero_is_infinite


class Visit(NamedTuple):
    """The rows that chose a group."""

    tokens: slice
    pairs: Tensor
    """Indices into the [R * k] pairs of a row and a group."""
    rows: Tensor


class Routes:
    """The groups [R, k] of all rows, sorted by group. Iterates over the groups that were chosen."""

    def __init__(self, groups: Tensor, tokens: int, group_size: int) -> None:
        self.tokens, self.group_size = tokens, group_size
        count = -(-tokens // group_size)
        ordered, self.pairs = groups.reshape(-1).sort(stable=True)
        self.rows = self.pairs // max(1, groups.shape[1])
        edges = torch.arange(count + 1, device=groups.device)
        self.bounds: list[int] = torch.searchsorted(ordered, edges).tolist()
        if self.bounds[0] or self.bounds[-1] < len(ordered):
            raise IndexError(
                f"groups must be from 0 to {count - 1}, got {int(ordered[0])} to {int(ordered[-1])}"
            )

    def __iter__(self) -> Iterator[Visit]:
        for group, (start, stop) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            if start < stop:
                first = group * self.group_size
                tokens = slice(first, min(self.tokens, first + self.group_size))
                yield Visit(tokens, self.pairs[start:stop], self.rows[start:stop])

    def new_scores(self, rows: Tensor, k: int, dtype: torch.dtype, fill: float) -> Tensor:
        """Return memory for [R, k * group_size] numbers; what no group will write is filled."""
        shape = (rows.shape[0], k * self.group_size)
        if self.tokens % self.group_size:
            return rows.new_full(shape, fill, dtype=dtype)
        return rows.new_empty(shape, dtype=dtype)

    def by_pair(self, scores: Tensor, width: int) -> Tensor:
        """View [R, k * group_size] numbers as [R * k, width]."""
        return scores.view(-1, self.group_size)[:, :width]


def run_grouped(
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    groups: Tensor,
    gates: Tensor | None,
    added: Tensor | None,
    options: ThetaOptions,
    group_size: int,
    norm: str,
    gram_root: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the output and, given the scores [..., m] of added tokens, their weights [..., m]."""
    x, keys, values = autocast(x, keys, values)
    wide = accumulation_dtype(x.dtype)
    rows = as_rows(x)
    chosen = groups.reshape(rows.shape[0], groups.shape[-1])  # [R, k]
    if gates is not None:
        gates = gates.reshape(chosen.shape).to(wide)
    if added is not None:
        added = added.reshape(rows.shape[0], added.shape[-1])  # [R, m]
    norms = all_norms(rows, keys, added, gram_root) if norm == "all" else None
    theta, scale, approximate, eps = options
    trained = is_trained(*(t for t in (x, keys, values, gates, added, scale) if t is not None))
    if not trained and not torch.compiler.is_compiling():
        given = rows, keys, values, chosen, gates, added, norms, options, group_size
        with no_autocast(x):
            # Native code takes the norm over the chosen tokens from these alone.
            is_native = supports(rows, keys, values) and (added is None or norms is not None)
            out, weights = (run_native if is_native else forward)(*given)
    else:
        scale = torch.as_tensor(scale, dtype=wide, device=x.device)
        tensors = rows, keys, values, chosen, gates, added, norms, scale
        out, weights = registered_forward(*tensors, group_size, theta, approximate, eps)[:2]
    return with_leading(out, x), None if added is None else with_leading(weights, x)


def all_norms(x: Tensor, keys: Tensor, added: Tensor | None, gram_root: Tensor | None) -> Tensor:
    """Return the norms [R, 1] over the scores of all tokens; infinite for zero rows."""
    norms = score_norms(x, keys, gram_root)
    if added is not None:
        with no_autocast(x):  # the length of a zero vector has a gradient of zero
            parts = torch.cat([norms, added.to(norms.dtype)], dim=1)
            norms = torch.linalg.vector_norm(parts, dim=1, keepdim=True)
    return zero_is_infinite(norms)


def run_native(
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    groups: Tensor,
    gates: Tensor | None,
    added: Tensor | None,
    norms: Tensor | None,
    options: ThetaOptions,
    group_size: int,
) -> tuple[Tensor, Tensor]:
    out = routed.run(x, keys, values, groups, gates, norms, options, group_size)
    if added is None:
        return out, x.new_empty(len(x), 0)
    weights = torch.empty_like(added, dtype=accumulation_dtype(x.dtype))
    DERIVATIVES[options.theta](options).fill_weights(added.to(weights.dtype), weights, norms)
    return out, weights.to(x.dtype)


def forward(
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    groups: Tensor,
    gates: Tensor | None,
    added: Tensor | None,
    norms: Tensor | None,
    options: ThetaOptions,
    group_size: int,
) -> tuple[Tensor, Tensor]:
    if has_slow_products(x.device.type, x.dtype):
        dtype, x, keys, values = x.dtype, x.float(), keys.float(), values.float()
        added = None if added is None else added.float()
        found = forward(x, keys, values, groups, gates, added, norms, options, group_size)
        return found[0].to(dtype), found[1].to(dtype)
    return forward_and_saved(x, keys, values, groups, gates, added, norms, options, group_size)[:2]


def forward_and_saved(
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    groups: Tensor,
    gates: Tensor | None,
    added: Tensor | None,
    norms: Tensor | None,
    options: ThetaOptions,
    group_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the output [R, d_out], the weights of added tokens [R, m], the scores
    [R, k * group_size] and their row statistics."""
    theta = DERIVATIVES[options.theta](options)
    routes, k = Routes(groups, keys.shape[0], group_size), groups.shape[1]
    wide = accumulation_dtype(x.dtype)
    scores = routes.new_scores(x, k, x.dtype, padding(options.theta))
    for tokens, pairs, rows in routes:
        some_keys = keys[tokens]
        found = x.index_select(0, rows) @ some_keys.T  # [pairs, group_size]
        routes.by_pair(scores, len(some_keys)).index_copy_(0, pairs, found)
    weights, width = torch.empty_like(scores), scores.shape[1]
    added_weights = x.new_empty(x.shape[0], 0 if added is None else added.shape[1])
    stats = x.new_empty(x.shape[0], theta.saved_per_row, dtype=wide)
    for few in cached_rows(scores) if k or added is not None else []:
        all_scores = beside(scores[few].to(wide), added, few)
        filled = torch.empty_like(all_scores)
        numbers = theta.fill_weights(all_scores, filled, None if norms is None else norms[few])
        torch.cat(numbers, dim=1, out=stats[few])
        if gates is not None:
            by_group(filled, k, group_size).mul_(gates[few, :, None])
        weights[few], added_weights[few] = filled[:, :width], filled[:, width:]
    out = x.new_zeros(x.shape[0], values.shape[1], dtype=wide)
    for tokens, pairs, rows in routes:
        some_values = values[tokens]
        some = routes.by_pair(weights, len(some_values)).index_select(0, pairs)
        out.index_add_(0, rows, (some @ some_values).to(wide))
    return out.to(x.dtype), added_weights, scores, stats


def beside(scores: Tensor, added: Tensor | None, rows: slice) -> Tensor:
    """Return scores of some rows with those of added tokens as further columns."""
    if added is None:
        return scores
    return torch.cat([scores, added[rows].to(scores.dtype)], dim=1)


def by_group(scores: Tensor, k: int, group_size: int) -> Tensor:
    """View the scores of the chosen tokens [R, k * group_size + m] as [R, k, group_size]."""
    return scores[:, : k * group_size].unflatten(1, (k, group_size))


def backward(
    grad: Tensor,
    added_grad: Tensor | None,
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    groups: Tensor,
    gates: Tensor | None,
    added: Tensor | None,
    norms: Tensor | None,
    scores: Tensor,
    stats: Tensor,
    options: ThetaOptions,
    group_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, keys, values, gates, added scores, norms and the scale; those of
    gates, added scores and norms are empty where there are none."""
    theta = DERIVATIVES[options.theta](options)
    routes, k = Routes(groups, keys.shape[0], group_size), groups.shape[1]
    wide = stats.dtype
    grads = routes.new_scores(x, k, wide, 0.0)  # of the gated weights, then of the scores
    for tokens, pairs, rows in routes:
        some_values = values[tokens]
        found = (grad.index_select(0, rows) @ some_values.T).to(wide)
        routes.by_pair(grads, len(some_values)).index_copy_(0, pairs, found)
    weights = torch.empty_like(grads)
    dgates = x.new_empty((0, 0) if gates is None else gates.shape, dtype=wide)
    dadded = x.new_empty((0, 0) if added is None else added.shape)
    dnorms = x.new_zeros((0, 1) if norms is None else norms.shape, dtype=wide)
    dscale, width = stats.new_zeros(()), grads.shape[1]
    for few in cached_rows(grads) if k or added is not None else []:
        own_grads = beside(grads[few], added_grad, few)
        block = BackwardBlock(
            beside(scores[few].to(wide, copy=True), added, few),
            own_grads,
            weights[few] if added is None else torch.empty_like(own_grads),
            torch.empty_like(own_grads),
            stats[few].split(1, dim=1),
        )
        gated = None if gates is None else by_group(block.grad, k, group_size).clone()
        if gates is not None:
            by_group(block.grad, k, group_size).mul_(gates[few, :, None])
        if norms is None:
            dscale += theta.backward(block).sum()
        else:
            dscale += through_known_norms(theta, block, dnorms[few])
        if gates is not None and gated is not None:
            own_weights = by_group(block.weights, k, group_size)
            torch.sum(gated * own_weights, dim=2, out=dgates[few])
            own_weights.mul_(gates[few, :, None])
        if added is not None:  # the block is a copy
            grads[few], dadded[few] = block.grad[:, :width], block.grad[:, width:]
            weights[few] = block.weights[:, :width]
    dx = x.new_zeros(x.shape, dtype=wide)
    dkeys, dvalues = torch.zeros_like(keys), torch.zeros_like(values)
    for tokens, pairs, rows in routes:
        some_keys = keys[tokens]
        width = len(some_keys)
        some = routes.by_pair(weights, width).index_select(0, pairs).to(x.dtype)
        dvalues[tokens] = some.T @ grad.index_select(0, rows)
        some = routes.by_pair(grads, width).index_select(0, pairs).to(x.dtype)
        dkeys[tokens] = some.T @ x.index_select(0, rows)
        dx.index_add_(0, rows, (some @ some_keys).to(wide))
    return dx.to(x.dtype), dkeys, dvalues, dgates, dadded, dnorms, dscale


def through_known_norms(theta: ThetaDerivative, block: BackwardBlock, dnorms: Tensor) -> Tensor:
    """The derivative of l2_gelu where the norm is an input; returns that of the scale."""
    assert isinstance(theta, L2Gelu)
    factor = block.stats[0]
    sums = theta.backward_sums(block)  # dL / dfactor, factor = root / (norm + eps)
    block.grad.mul_(factor)
    torch.mul(sums, -(factor**2) / theta.root, out=dnorms)
    return (sums * factor).sum() * (theta.power / theta.scale)


def padding(theta: str) -> float:
    """The score of a token that is not there."""
    return float("-inf") if theta == "softmax" else 0.0


@torch.library.custom_op("tokenformer::routed_pattention", mutates_args=())
def registered_forward(
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    groups: Tensor,
    gates: Tensor | None,
    added: Tensor | None,
    norms: Tensor | None,
    scale: Tensor,
    group_size: int,
    theta: str,
    approximate: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options = ThetaOptions(theta, scale, approximate, eps)
    with no_autocast(x):
        return forward_and_saved(x, keys, values, groups, gates, added, norms, options, group_size)


@registered_forward.register_fake
def _(
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    groups: Tensor,
    gates: Tensor | None,
    added: Tensor | None,
    norms: Tensor | None,
    scale: Tensor,
    group_size: int,
    theta: str,
    approximate: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = x.shape[0]
    saved = DERIVATIVES[theta].saved_per_row
    return (
        x.new_empty(rows, values.shape[1]),
        x.new_empty(rows, 0 if added is None else added.shape[1]),
        x.new_empty(rows, groups.shape[1] * group_size),
        x.new_empty(rows, saved, dtype=accumulation_dtype(x.dtype)),
    )


@torch.library.custom_op("tokenformer::routed_pattention_backward", mutates_args=())
def registered_backward(
    grad: Tensor,
    added_grad: Tensor | None,
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    groups: Tensor,
    gates: Tensor | None,
    added: Tensor | None,
    norms: Tensor | None,
    scale: Tensor,
    scores: Tensor,
    stats: Tensor,
    group_size: int,
    theta: str,
    approximate: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    options = ThetaOptions(theta, scale, approximate, eps)
    with no_autocast(x):
        return backward(
            grad.contiguous(),
            added_grad,
            x,
            keys,
            values,
            groups,
            gates,
            added,
            norms,
            scores,
            stats,
            options,
            group_size,
        )


@registered_backward.register_fake
def _(
    grad: Tensor,
    added_grad: Tensor | None,
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    groups: Tensor,
    gates: Tensor | None,
    added: Tensor | None,
    norms: Tensor | None,
    scale: Tensor,
    *_: Any,
) -> tuple[Tensor, ...]:
    wide = accumulation_dtype(x.dtype)
    return (
        torch.empty_like(x),
        torch.empty_like(keys),
        torch.empty_like(values),
        x.new_empty((0, 0) if gates is None else gates.shape, dtype=wide),
        x.new_empty((0, 0) if added is None else added.shape),
        x.new_empty((0, 1) if norms is None else norms.shape, dtype=wide),
        scale.new_empty((), dtype=wide),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.group_size, ctx.theta, ctx.approximate, ctx.eps = inputs
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, added_grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    none = (None,) * 12
    x, _, values, _, gates, added, norms, scale, *_ = tensors = ctx.saved_tensors
    if grad is None and added_grad is None:
        return none
    if grad is None:
        grad = x.new_zeros(x.shape[0], values.shape[1])
    if added is None:
        added_grad = None
    elif added_grad is None:
        added_grad = torch.zeros_like(added)
    dx, dkeys, dvalues, dgates, dadded, dnorms, dscale = registered_backward(
        grad, added_grad, *tensors, ctx.group_size, ctx.theta, ctx.approximate, ctx.eps
    )
    return (
        dx,
        dkeys,
        dvalues,
        None,
        None if gates is None else dgates,
        None if added is None else dadded,
        None if norms is None else dnorms,
        dscale.reshape(scale.shape).to(scale.dtype),
        *none[8:],
    )


registered_forward.register_autograd(_backward, setup_context=_save)
