"""Routed pattention by sorting: the rows of a group are multiplied with its tokens at once.

The pairs of a row and one of its groups are sorted by group. Per group there is one product with
its keys and one with its values, so that a row visits only the tokens of its groups. Between the
two, the scores of a row's groups lie side by side, [R, k * group_size], where theta is computed as
in `direct`. The backward pass is written by hand and saves only these scores.

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
    options: ThetaOptions,
    group_size: int,
    norm: str,
    gram_root: Tensor | None,
) -> Tensor:
    x, keys, values = autocast(x, keys, values)
    wide = accumulation_dtype(x.dtype)
    rows = as_rows(x)
    chosen = groups.reshape(rows.shape[0], groups.shape[-1])  # [R, k]
    if gates is not None:
        gates = gates.reshape(chosen.shape).to(wide)
    norms = zero_is_infinite(score_norms(rows, keys, gram_root)) if norm == "all" else None
    theta, scale, approximate, eps = options
    trained = is_trained(*(t for t in (x, keys, values, gates, scale) if t is not None))
    if not trained and not torch.compiler.is_compiling():
        with no_autocast(x):
            if supports(rows, keys, values):
                out = routed.run(rows, keys, values, chosen, gates, norms, options, group_size)
            else:
                out = forward(rows, keys, values, chosen, gates, norms, options, group_size)
        return with_leading(out, x)
    scale = torch.as_tensor(scale, dtype=wide, device=x.device)
    out = registered_forward(
        rows, keys, values, chosen, gates, norms, scale, group_size, theta, approximate, eps
    )[0]
    return with_leading(out, x)


def forward(
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    groups: Tensor,
    gates: Tensor | None,
    norms: Tensor | None,
    options: ThetaOptions,
    group_size: int,
) -> Tensor:
    if has_slow_products(x.device.type, x.dtype):
        dtype, x, keys, values = x.dtype, x.float(), keys.float(), values.float()
        return forward(x, keys, values, groups, gates, norms, options, group_size).to(dtype)
    return forward_and_saved(x, keys, values, groups, gates, norms, options, group_size)[0]


def forward_and_saved(
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    groups: Tensor,
    gates: Tensor | None,
    norms: Tensor | None,
    options: ThetaOptions,
    group_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output [R, d_out], the scores [R, k * group_size] and their row statistics."""
    theta = DERIVATIVES[options.theta](options)
    routes, k = Routes(groups, keys.shape[0], group_size), groups.shape[1]
    wide = accumulation_dtype(x.dtype)
    scores = routes.new_scores(x, k, x.dtype, padding(options.theta))
    for tokens, pairs, rows in routes:
        some_keys = keys[tokens]
        found = x.index_select(0, rows) @ some_keys.T  # [pairs, group_size]
        routes.by_pair(scores, len(some_keys)).index_copy_(0, pairs, found)
    weights = torch.empty_like(scores)
    stats = x.new_empty(x.shape[0], theta.saved_per_row, dtype=wide)
    for few in cached_rows(scores) if k else []:
        filled = torch.empty_like(scores[few], dtype=wide)
        numbers = theta.fill_weights(
            scores[few].to(wide), filled, None if norms is None else norms[few]
        )
        torch.cat(numbers, dim=1, out=stats[few])
        if gates is not None:
            filled.view(-1, k, group_size).mul_(gates[few, :, None])
        weights[few] = filled
    out = x.new_zeros(x.shape[0], values.shape[1], dtype=wide)
    for tokens, pairs, rows in routes:
        some_values = values[tokens]
        some = routes.by_pair(weights, len(some_values)).index_select(0, pairs)
        out.index_add_(0, rows, (some @ some_values).to(wide))
    return out.to(x.dtype), scores, stats


def backward(
    grad: Tensor,
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    groups: Tensor,
    gates: Tensor | None,
    norms: Tensor | None,
    scores: Tensor,
    stats: Tensor,
    options: ThetaOptions,
    group_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, keys, values, gates, norms and the scale; those of gates and norms
    are empty where there are none."""
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
    dnorms = x.new_zeros((0, 1) if norms is None else norms.shape, dtype=wide)
    dscale = stats.new_zeros(())
    for few in cached_rows(grads) if k else []:
        block = BackwardBlock(
            scores[few].to(wide, copy=True),
            grads[few],
            weights[few],
            torch.empty_like(weights[few]),
            stats[few].split(1, dim=1),
        )
        gated = None if gates is None else block.grad.clone().view(-1, k, group_size)
        if gates is not None:
            block.grad.view(-1, k, group_size).mul_(gates[few, :, None])
        if norms is None:
            dscale += theta.backward(block).sum()
        else:
            dscale += through_known_norms(theta, block, dnorms[few])
        if gates is not None and gated is not None:
            by_group = block.weights.view(-1, k, group_size)
            torch.sum(gated * by_group, dim=2, out=dgates[few])
            by_group.mul_(gates[few, :, None])
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
    return dx.to(x.dtype), dkeys, dvalues, dgates, dnorms, dscale


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
    norms: Tensor | None,
    scale: Tensor,
    group_size: int,
    theta: str,
    approximate: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    options = ThetaOptions(theta, scale, approximate, eps)
    with no_autocast(x):
        return forward_and_saved(x, keys, values, groups, gates, norms, options, group_size)


@registered_forward.register_fake
def _(
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    groups: Tensor,
    gates: Tensor | None,
    norms: Tensor | None,
    scale: Tensor,
    group_size: int,
    theta: str,
    approximate: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.shape[0]
    saved = DERIVATIVES[theta].saved_per_row
    return (
        x.new_empty(rows, values.shape[1]),
        x.new_empty(rows, groups.shape[1] * group_size),
        x.new_empty(rows, saved, dtype=accumulation_dtype(x.dtype)),
    )


@torch.library.custom_op("tokenformer::routed_pattention_backward", mutates_args=())
def registered_backward(
    grad: Tensor,
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    groups: Tensor,
    gates: Tensor | None,
    norms: Tensor | None,
    scale: Tensor,
    scores: Tensor,
    stats: Tensor,
    group_size: int,
    theta: str,
    approximate: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    options = ThetaOptions(theta, scale, approximate, eps)
    with no_autocast(x):
        return backward(
            grad.contiguous(),
            x,
            keys,
            values,
            groups,
            gates,
            norms,
            scores,
            stats,
            options,
            group_size,
        )


@registered_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    groups: Tensor,
    gates: Tensor | None,
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
        x.new_empty((0, 1) if norms is None else norms.shape, dtype=wide),
        scale.new_empty((), dtype=wide),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.group_size, ctx.theta, ctx.approximate, ctx.eps = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    none = (None,) * 11
    if grad is None:
        return none
    *_, gates, norms, scale, _, _ = tensors = ctx.saved_tensors
    dx, dkeys, dvalues, dgates, dnorms, dscale = registered_backward(
        grad, *tensors, ctx.group_size, ctx.theta, ctx.approximate, ctx.eps
    )
    return (
        dx,
        dkeys,
        dvalues,
        None,
        None if gates is None else dgates,
        None if norms is None else dnorms,
        dscale.reshape(scale.shape).to(scale.dtype),
        *none[7:],
    )


registered_forward.register_autograd(_backward, setup_context=_save)
