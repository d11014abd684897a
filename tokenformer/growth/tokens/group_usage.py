"""Statistics of the groups of a routed layer on data, for pruning.

A group contributes to the output of the rows that choose it, and only to these. With w_i the
weights of its tokens in a row, gate included and zero where the row chooses other groups,

    contribution   E || sum_i w_i v_i ||^2      mean square of what the group adds to the output

the sum over the tokens of the group. This is the squared error of the layer without the group.

Without some groups, a row chooses the best of the others (`KeptGroups`).
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer.growth.tokens.token_usage import (
    MASSES,
    idle_tokens,
    row_chunks,
    scores_and_weights,
)
from tokenformer.layers.routed_pattention import RoutedPattention
from tokenformer.layers.router import largest
from tokenformer.ops.routed_pattention import dense_weights, group_mask
from tokenformer.ops.theta import ThetaOptions, accumulation_dtype


class KeptGroups:
    """A routed layer that has only some of its groups [G'], in their old order."""

    def __init__(self, layer: RoutedPattention, groups: Tensor) -> None:
        self.layer, self.groups = layer, groups
        self.active_groups = min(layer.active_groups, len(groups))

    @classmethod
    def all_of(cls, layer: RoutedPattention) -> "KeptGroups":
        return cls(layer, torch.arange(layer.num_groups))

    @cached_property
    def rows(self) -> Tensor:
        """The tokens of the groups [n'], in their old order."""
        layer = self.layer
        return group_mask(self.groups, layer.num_tokens, layer.group_size).nonzero().flatten()

    def scale(self, factor: float) -> float:
        """Return the scale of the smaller layer whose scale in the norm is `factor` times that of
        the whole one."""
        layer, left = self.layer, len(self.rows)
        whole = float(layer.scale_tokens)
        if layer.norm == "all":
            return whole * factor
        # The layer multiplies its scale by the share of its tokens that are active.
        active = min(left, self.active_groups * layer.group_size)
        return whole * factor * (layer.tokens_per_row * left) / (layer.num_tokens * active)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the groups of every row [R, k], as indices of `groups`, and their gates."""
        router, groups = self.layer.router, self.groups.to(x.device)
        scores = router.scores(router.normalized(x), self.layer.directions())[:, groups]
        chosen = largest(scores + router.bias[groups], self.active_groups)
        return chosen, router.gates(scores, chosen)

    def mask(self, x: Tensor) -> Tensor:
        """Return which tokens of the whole layer every row visits [R, n]."""
        groups = self.groups.to(x.device)[self.choose(x)[0]]
        return group_mask(groups, self.layer.num_tokens, self.layer.group_size)

    def weights(self, x: Tensor, scale: float) -> Tensor:
        """Return the weights of the tokens [R, n'], in fp32 or wider, at the scale of the smaller
        layer."""
        layer, left = self.layer, len(self.rows)
        wide = accumulation_dtype(layer.key_tokens.dtype)
        if layer.norm == "chosen":
            scale *= min(left, self.active_groups * layer.group_size) / left
        keys = layer.key_tokens[self.rows.to(x.device)]
        return dense_weights(
            x.to(wide) @ keys.to(wide).T,
            *self.choose(x),
            None,
            ThetaOptions(layer.theta, scale, layer.approximate, layer.eps),
            layer.group_size,
            layer.norm,
        ).weights


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of the groups of one layer."""

    contribution: Tensor  # [groups], float64
    idle: Tensor  # [groups]
    """Groups that can go without changing the output of any row of the data."""


class GroupUsageSums:
    """Running sums over the input rows of one routed layer."""

    def __init__(self, layer: RoutedPattention) -> None:
        self.layer = layer
        groups, size = layer.num_groups, layer.group_size
        self.products = torch.zeros(groups, size, size, dtype=torch.float64)
        """Sums of w_i w_j over the rows, for the tokens of every group."""
        self.chosen = torch.zeros(groups, dtype=torch.int64)
        self.rows = 0

    def add(self, x: Tensor) -> None:
        layer, whole = self.layer, KeptGroups.all_of(self.layer)
        for rows in row_chunks(layer, x):
            weights = whole.weights(rows, float(layer.scale_tokens))  # [R, n]
            by_group = F.pad(weights, (0, -weights.shape[1] % layer.group_size))
            by_group = by_group.unflatten(1, (-1, layer.group_size)).transpose(0, 1)  # [G, R, size]
            self.products += (by_group.mT @ by_group).cpu().double()
            groups = whole.choose(rows)[0].flatten().cpu()
            self.chosen += groups.bincount(minlength=layer.num_groups)
            self.rows += len(rows)

    def result(self) -> GroupStatistics:
        layer = self.layer
        values = layer.value_tokens.detach().cpu().double()
        values = F.pad(values, (0, 0, 0, -len(values) % layer.group_size))
        values = values.unflatten(0, (-1, layer.group_size))  # [G, size, d_out]
        energy = (self.products * (values @ values.mT)).sum((1, 2)).clamp_min(0)
        idle = self.chosen == 0
        if layer.norm == "all":  # a group that no row chooses is in the norm, unless its keys are 0
            idle &= zero_key_groups(layer)
        return GroupStatistics(energy / max(1, self.rows), idle)


class NormShare:
    """The mean over rows of what is left of the norm of a layer, as a share of its mass (see
    `token_usage`). A row that chooses other groups than before may have a share above 1."""

    def __init__(self, kept: KeptGroups) -> None:
        self.kept, self.whole = kept, KeptGroups.all_of(kept.layer)
        self.total, self.rows = 0.0, 0

    def add(self, x: Tensor) -> None:
        layer = self.kept.layer
        for rows in row_chunks(layer, x):
            scores, weights = scores_and_weights(layer, rows, layer.key_tokens, layer.scale_tokens)
            mass = MASSES[layer.theta].of_scores(scores, weights)  # [R, n]
            if layer.norm == "all":
                before, after = mass.sum(1), mass[:, self.kept.rows.to(mass.device)].sum(1)
            else:
                before, after = ((mass * one.mask(rows)).sum(1) for one in (self.whole, self.kept))
            measured = before > 0  # a row whose scores are all zero has no share
            self.total += (after[measured] / before[measured]).double().sum().item()
            self.rows += int(measured.sum())

    def result(self) -> float:
        return self.total / self.rows if self.total > 0 else 1.0  # a scale is positive


def zero_key_groups(layer: RoutedPattention) -> Tensor:
    """Return a mask [groups] of the groups without scores; none with softmax."""
    missing = -layer.num_tokens % layer.group_size
    idle = F.pad(idle_tokens(layer), (0, missing), value=True)
    return idle.unflatten(0, (-1, layer.group_size)).all(1) & (layer.theta != "softmax")


def idle_groups(layer: RoutedPattention) -> Tensor:
    """Return a mask [groups] of the groups that can go without changing the output of any row: only
    if all groups are active is it known without data that no other group takes the place of one.
    """
    return zero_key_groups(layer) & (layer.active_groups == layer.num_groups)
