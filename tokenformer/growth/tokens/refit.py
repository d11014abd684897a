"""Values of the kept tokens, fitted so that a layer's output stays what it was.

A dropped token's output is partly in the span of what the others add. With W [R, m] the kept
tokens' weights on R rows of data and Y [R, d_out] the output of the whole layer, the new values are

    V' = V + argmin_D ||W (V + D) - Y||^2 + lambda ||D||^2

the ridge regression that brings back what the kept tokens can bring back, and where there is little
data, changes little. W^T W [m, m] and W^T (Y - W V) [m, d_out] are summed over the data in float64;
of all layers' sums no more than `HELD_BYTES` are held at once, at the price of another pass.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenformer.growth.tokens.token_set import TokenSet
from tokenformer.growth.tokens.token_usage import attended, in_parts, observe
from tokenformer.layers.pattention import Pattention

RIDGE = 1e-3
"""Lambda, as a share of the mean of W^T W's diagonal."""
HELD_BYTES = 1 << 30


class Fit:
    """The regression of one layer."""

    def __init__(self, module: Pattention, kept: TokenSet) -> None:
        self.module, self.kept = module, kept
        self.gram = torch.zeros(kept.size, kept.size, dtype=torch.float64)
        self.lack = torch.zeros(kept.values.shape, dtype=torch.float64)

    def add(self, x: Tensor) -> None:
        layer, kept = self.module, self.kept
        for rows in in_parts(layer, x):
            _, whole = attended(layer, rows, layer.key_tokens, layer.scale_tokens)  # [R, n]
            _, weights = attended(layer, rows, kept.keys, kept.scale)  # [R, m]
            wanted = whole @ layer.value_tokens.to(whole.dtype)  # [R, d_out]
            missing = wanted - weights @ kept.values.to(whole.dtype)
            self.gram += (weights.T @ weights).cpu().double()
            self.lack += (weights.T @ missing).cpu().double()

    def values(self) -> Tensor:
        damping = RIDGE * self.gram.diagonal().mean()
        if not damping > 0:  # no weight on any row: nothing to go by
            return self.kept.values
        self.gram.diagonal().add_(damping)
        change = torch.cholesky_solve(self.lack, torch.linalg.cholesky(self.gram))
        return self.kept.values + change.to(self.kept.values)


def refitted(
    model: Any, kept: Mapping[str, TokenSet], batches: Sequence[Tensor]
) -> dict[str, Tensor]:
    """New values for the layers named in `kept`, which holds what is left of their tokens."""
    values: dict[str, Tensor] = {}
    for names in groups(kept):
        fits = {name: Fit(model.get_submodule(name), kept[name]) for name in names}
        observe(model, batches, {name: fit.add for name, fit in fits.items()})
        values |= {name: fit.values() for name, fit in fits.items()}
    return values


def groups(kept: Mapping[str, TokenSet]) -> Iterator[list[str]]:
    """Layers whose sums are held together."""
    together: list[str] = []
    held = 0
    for name, tokens in kept.items():
        size = 8 * tokens.size * (tokens.size + tokens.values.shape[1])
        if together and held + size > HELD_BYTES:
            yield together
            together, held = [], 0
        together.append(name)
        held += size
    if together:
        yield together
