"""Refitting the values of kept tokens to a layer's output before pruning, by ridge regression.

With W [R, m] the kept tokens' weights on R rows of data and Y [R, d_out] the output of the whole
layer, the new values are

    V' = V + argmin_D ||W (V + D) - Y||^2 + lambda ||D||^2

The penalty keeps the values close to V where there is little data. W^T W [m, m] and W^T (Y - W V)
[m, d_out] are summed over the data in float64. Layers whose sums exceed `MAX_BYTES` together are
fitted in several passes over the data.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from tokenformer.growth.tokens.group_usage import KeptGroups
from tokenformer.growth.tokens.token_set import TokenSet
from tokenformer.growth.tokens.token_usage import observe_inputs, row_chunks, scores_and_weights
from tokenformer.layers.pattention import Pattention

Name = TypeVar("Name")
RIDGE = 1e-3
"""Lambda, relative to the mean of the diagonal of W^T W."""
MAX_BYTES = 1 << 30


class ValueFit:
    """The ridge regression of one layer, for the values of all kept tokens or of those that `free`
    [m] marks."""

    def __init__(self, module: Pattention, kept: TokenSet, free: Tensor | None = None) -> None:
        self.module, self.kept = module, kept
        self.free = torch.ones(kept.size, dtype=torch.bool) if free is None else free
        count = int(self.free.sum())
        self.gram = torch.zeros(count, count, dtype=torch.float64)
        self.residual = torch.zeros(count, kept.values.shape[1], dtype=torch.float64)

    def weights(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights of the tokens in the whole layer [R, n] and of the kept ones [R, m],
        in fp32 or wider."""
        layer, kept = self.module, self.kept
        _, whole = scores_and_weights(layer, rows, layer.key_tokens, layer.scale_tokens)
        return whole, scores_and_weights(layer, rows, kept.keys, kept.scale)[1]

    def add(self, x: Tensor) -> None:
        layer, kept = self.module, self.kept
        for rows in row_chunks(layer, x):
            whole, weights = self.weights(rows)
            target = whole @ layer.value_tokens.to(whole.dtype)  # [R, d_out]
            missing = target - weights @ kept.values.to(whole.dtype)
            weights = weights[:, self.free.to(weights.device)]
            self.gram += (weights.T @ weights).cpu().double()
            self.residual += (weights.T @ missing).cpu().double()

    def values(self) -> Tensor:
        values = self.kept.values.clone()
        damping = RIDGE * self.gram.diagonal().mean()
        if not damping > 0:  # all weights are zero, or no value is free
            return values
        self.gram.diagonal().add_(damping)
        change = torch.cholesky_solve(self.residual, torch.linalg.cholesky(self.gram))
        values[self.free.to(values.device)] += change.to(values)
        return values


class RoutedValueFit(ValueFit):
    """The ridge regression of a routed layer, with the groups that every row visits before and
    after. The layer's bias stays."""

    def __init__(self, groups: KeptGroups, kept: TokenSet) -> None:
        super().__init__(groups.layer, kept)
        self.whole, self.groups = KeptGroups.all_of(groups.layer), groups

    def weights(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        scale = float(self.module.scale_tokens)
        return self.whole.weights(rows, scale), self.groups.weights(rows, self.kept.scale)


def refit_values(
    model: PreTrainedModel,
    kept: Mapping[str, TokenSet],
    batches: Sequence[Tensor],
    groups: Mapping[str, KeptGroups],
) -> dict[str, Tensor]:
    """Return new values for the layers in `kept`, which holds their remaining tokens; `groups`
    holds the remaining groups of those that are routed."""
    values: dict[str, Tensor] = {}
    for names in memory_groups(kept):
        fits = {
            name: RoutedValueFit(groups[name], kept[name])
            if name in groups
            else ValueFit(model.get_submodule(name), kept[name])
            for name in names
        }
        observe_inputs(model, batches, {name: fit.add for name, fit in fits.items()})
        values |= {name: fit.values() for name, fit in fits.items()}
    return values


def memory_groups(kept: Mapping[Name, TokenSet]) -> Iterator[list[Name]]:
    """Yield groups of layers whose sums fit in `MAX_BYTES`."""
    group: list[Name] = []
    held = 0
    for name, tokens in kept.items():
        size = 8 * tokens.size * (tokens.size + tokens.values.shape[1])
        if group and held + size > MAX_BYTES:
            yield group
            group, held = [], 0
        group.append(name)
        held += size
    if group:
        yield group
