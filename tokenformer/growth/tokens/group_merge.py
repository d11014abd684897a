"""Merging two routed layers: the groups of both side by side, and the outputs of both routers.

Groups whose tokens are bit-identical in both layers are kept once, with the mean of their router
outputs; the others are a's own and b's own groups. A row then chooses among all of them, as many as
in both layers together less those that both choose. If rows choose all groups of a layer equally
often, the c common groups of G_a and G_b are the share c / G_a of the k_a active ones in a:

    k = k_a + k_b - max(k_a c / G_a, k_b c / G_b)       rounded up, and at least k_a and k_b

So two models without common groups cost as much as both together. A model merged with itself, or
with itself grown, costs no more than before.

A row should choose as many of the own groups of each model as before. So the biases of b's router
are shifted: the score that is just enough to be chosen becomes that of a. It is computed for
isotropic rows, whose scores are normal with the lengths of the router's weights as deviations.

With theta_norm `all` the scale is that of a dense layer (`merge`). With `chosen` it is set by the
tokens that a row visits: each has the scale per visited token that it had before, common ones the
mean of both.
"""

import math
from typing import Any

import torch
from torch import Tensor

from tokenformer.growth.parameter_mapping import NEW, ParameterMapping
from tokenformer.growth.tokens.layer_merge import RowMatch, match_rows, merged_scale, token_hashes
from tokenformer.growth.tokens.token_set import Replacement, TokenSet
from tokenformer.layers.routed_pattention import RoutedPattention

REACH = 6.0
"""Standard deviations of a score beyond which no row is expected."""
BISECTIONS = 60


class RoutedMerge:
    """The merge of two routed layers with the same options; values of groups that only one has are
    multiplied by `factor`."""

    def __init__(self, name: str, a: RoutedPattention, b: RoutedPattention, factor: float) -> None:
        self.a, self.b, self.factor = a, b, factor
        self.size = a.group_size
        self.tokens = TokenSet.of(a), TokenSet.of(b, a.key_tokens.device)
        hashes = [token_hashes(tokens) for tokens in self.tokens]
        self.groups = match_rows(*([b"".join(p) for p in self.split(each)] for each in hashes))
        """The groups that both have, and those that only one has."""
        self.order = self.ordered(name)
        """Groups of the merged layer: numbers of a's groups, and a's number of groups plus those of
        b's."""
        self.shift = chosen_from(a) - chosen_from(b)
        """Added to the biases of b."""

    def split(self, rows: list[Any]) -> list[list[Any]]:
        return [rows[start : start + self.size] for start in range(0, len(rows), self.size)]

    def ordered(self, name: str) -> list[int]:
        """Return a's groups in their order and b's own ones, a smaller group last."""
        count = self.a.num_groups
        order = [*range(count), *(count + group for group in self.groups.own_b)]
        smaller = [group for group in order if len(self.rows_of(group)) < self.size]
        if len(smaller) > 1:
            raise ValueError(
                f"the last groups of {name} have fewer than group_size={self.size} tokens in both "
                "models, and only one group of a layer may be smaller; prune both models to "
                "multiples of group_size first"
            )
        return [group for group in order if group not in smaller] + smaller

    def rows_of(self, group: int) -> range:
        """Return the tokens of a group: rows of a, or a's number of tokens plus rows of b."""
        a, b = self.tokens
        if group < self.a.num_groups:
            return range(group * self.size, min((group + 1) * self.size, a.size))
        start = (group - self.a.num_groups) * self.size
        return range(a.size + start, a.size + min(start + self.size, b.size))

    def replacement(self, rates_of_b: list[float] | None) -> Replacement:
        a, b = self.tokens
        rows = torch.tensor([row for group in self.order for row in self.rows_of(group)])
        own = {row for group in self.groups.own_a for row in self.rows_of(group)}
        is_own = torch.tensor([row >= a.size or row in own for row in rows.tolist()])
        factors = a.values.new_ones(len(rows), 1)
        factors[is_own.to(factors.device)] = self.factor
        at = rows.to(a.keys.device)
        keys, values = torch.cat([a.keys, b.keys])[at], torch.cat([a.values, b.values])[at]
        new = rows >= a.size
        return Replacement(
            TokenSet(keys, values * factors, self.scale),
            torch.where(new, NEW, rows),
            factors.masked_fill(new.to(factors.device)[:, None], 1.0),
            [1.0 if rates_of_b is None else rates_of_b[row - a.size] for row in rows[new].tolist()],
            self.active_groups,
        )

    @property
    def active_groups(self) -> int:
        a, b, common = self.a, self.b, len(self.groups.common_a)
        both = max(a.active_groups * common / a.num_groups, b.active_groups * common / b.num_groups)
        count = math.ceil(round(a.active_groups + b.active_groups - both, 6))
        return min(len(self.order), max(count, a.active_groups, b.active_groups))

    @property
    def scale(self) -> float:
        a, b = self.tokens
        if self.a.norm == "all":
            return merged_scale(a, b, self.row_match(), self.a.theta)
        size = sum(len(self.rows_of(group)) for group in self.order)
        visited = min(size, self.active_groups * self.size)
        total, rest = 0.0, float(visited)
        for layer, own in ((self.a, self.groups.own_a), (self.b, self.groups.own_b)):
            tokens = layer.tokens_per_row * len(own) / layer.num_groups
            total += tokens * float(layer.scale_tokens) / layer.num_tokens
            rest -= tokens
        total += max(0.0, rest) * (a.scale / a.size + b.scale / b.size) / 2
        return total * size / visited

    def row_match(self) -> RowMatch:
        """Return the match of the tokens."""
        first, found = self.a.num_groups, self.groups
        common_a, own_a = (
            [row for group in groups for row in self.rows_of(group)]
            for groups in (found.common_a, found.own_a)
        )
        common_b, own_b = (
            [row - self.tokens[0].size for group in groups for row in self.rows_of(first + group)]
            for groups in (found.common_b, found.own_b)
        )
        return RowMatch(common_a, common_b, own_a, own_b)

    def copy(self, name: str, tensor: Tensor, other: Tensor) -> tuple[Tensor, ParameterMapping]:
        """Merge a tensor of the layer that is not of its tokens."""
        if not name.rpartition(".")[0].endswith(".router"):  # the bias of the output
            alike = torch.equal(tensor, other)
            total = tensor.clone() if alike else (tensor + other) * self.factor
            return total, ParameterMapping(name, scale=1.0 if alike else self.factor)
        if name.endswith(".bias"):
            other = other + self.shift
        common_a, common_b = self.groups.common_a, self.groups.common_b
        mean = tensor.clone()
        mean[common_a] = (tensor[common_a] + other[common_b]) / 2
        order = torch.tensor(self.order)
        rows = torch.where(order < len(tensor), order, NEW)
        return torch.cat([mean, other])[order.to(tensor.device)], ParameterMapping(name, rows)


def chosen_from(layer: RoutedPattention) -> float:
    """Return the score, with bias, from which a group is chosen on average over isotropic rows:
    between those at which half a group fewer and half a group more than the active ones are."""
    directions = layer.router.rows(layer.directions()).detach().double()
    spread = directions.norm(dim=1).clamp_min(1e-6)
    bias = layer.router.bias.double()
    least, most = (bias - REACH * spread).min(), (bias + REACH * spread).max()

    def crossing(count: float) -> Tensor:
        low, high = least, most
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            expected = torch.special.erfc((middle - bias) / (spread * math.sqrt(2))).sum() / 2
            low, high = (middle, high) if expected > count else (low, middle)
        return (low + high) / 2

    k = layer.active_groups
    return float((crossing(k - 0.5) + crossing(k + 0.5)) / 2)
