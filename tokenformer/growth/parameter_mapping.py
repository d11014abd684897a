"""Which old entry each entry of a grown parameter comes from.

Every growth method copies entries of old tensors to positions in new ones, possibly scaled, and
initializes the rest. A `ParameterMapping` records this for one parameter. Optimizer moments and
moving averages of the old parameter are mapped the same way.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NEW = -1
"""Index of a row or column without an old entry."""
MEAN = -2
"""Index of a row or column that holds the mean over all old ones."""


@dataclass(frozen=True)
class ParameterMapping:
    """new[i, j] = old[rows[i], columns[j]] * scale; NEW marks new rows or columns.

    None for `rows` or `columns` keeps that dimension. Scales are numbers, or tensors that broadcast
    to the new parameter.

    `gradient_scale` is the ratio of the new entry's gradient to the old entry's, at the moment of
    growth. Example: the key of a token that was cloned k times, its value divided by k, gets 1/k of
    the old gradient.
    """

    source: str | None
    """Name of the old parameter; None if all entries are new."""
    rows: Tensor | None = None
    columns: Tensor | None = None
    scale: float | Tensor = 1.0
    gradient_scale: float | Tensor = 1.0

    def gather(self, old: Tensor) -> Tensor:
        """Return the old entries at their new positions, unscaled; new entries are zero."""
        for dimension, index in enumerate((self.rows, self.columns)):
            if index is not None:
                old = gather_along(old, dimension, index.to(old.device))
        return old

    def apply(self, old: Tensor) -> Tensor:
        """Return the old entries at their new positions, times `scale`; new entries are zero."""
        return self.gather(old) * match_dtype(self.scale, old)

    def is_new(self, shape: torch.Size, device: torch.device) -> Tensor:
        """Return a mask of the entries without an old one, broadcastable to `shape`."""
        mask = torch.zeros([1] * len(shape), dtype=torch.bool, device=device)
        for dimension, index in enumerate((self.rows, self.columns)):
            if index is not None:
                broadcast = [1] * len(shape)
                broadcast[dimension] = -1
                mask = mask | (index.to(device) < 0).view(broadcast)
        return mask


def gather_along(old: Tensor, dimension: int, index: Tensor) -> Tensor:
    """`index_select` that gives zeros for NEW and the mean for MEAN."""
    selected = old.index_select(dimension, index.clamp_min(0))
    selected.index_fill_(dimension, (index == NEW).nonzero().flatten(), 0)
    averaged = (index == MEAN).nonzero().flatten()
    if len(averaged):
        mean = old.mean(dimension, keepdim=True)
        selected.index_copy_(dimension, averaged, mean.repeat_interleave(len(averaged), dimension))
    return selected


def match_dtype(scale: float | Tensor, tensor: Tensor) -> float | Tensor:
    """Return `scale` in the dtype and on the device of `tensor`."""
    return scale.to(tensor) if isinstance(scale, Tensor) else scale


def extended_index(before: int, after: int) -> Tensor:
    """Return an index that keeps the old rows and marks those after them as NEW."""
    rows = torch.full((after,), NEW)
    rows[:before] = torch.arange(before)
    return rows
