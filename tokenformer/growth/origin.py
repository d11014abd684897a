"""Where the entries of a grown parameter come from.

Every way of growing a model copies entries of old tensors to places in new ones, possibly scaled,
and puts something fresh in between. An `Origin` writes that down for one parameter, once, and with
it what belongs to the old parameter (the moments of an optimizer, a moving average) follows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NEW = -1
"""The index of a place that no old entry came to."""
MEAN = -2
"""The index of a place that holds the mean of all old entries, of which none is its own."""


@dataclass(frozen=True)
class Origin:
    """new[i, j] came from old[rows[i], columns[j]], times `scale`; NEW marks fresh rows or columns.

    Scales are numbers, or tensors that broadcast to the new parameter.

    `gradient_scale` is what the loss's gradient at the new place is of the gradient at the old one,
    at the moment of growth: a token that was cloned k times, its value divided by k, gets 1/k of
    the gradient on each key. None for `rows` or `columns` means that all stayed in their places.
    """

    name: str | None
    """The old parameter; None for a wholly new one."""
    rows: Tensor | None = None
    columns: Tensor | None = None
    scale: float | Tensor = 1.0
    gradient_scale: float | Tensor = 1.0

    def moved(self, old: Tensor) -> Tensor:
        """The old entries in their new places, unscaled; zero where there is a new one."""
        for dimension, index in enumerate((self.rows, self.columns)):
            if index is not None:
                old = take(old, dimension, index.to(old.device))
        return old

    def scaled(self, old: Tensor) -> Tensor:
        """The old entries in their new places, as the new parameter has them."""
        return self.moved(old) * like(self.scale, old)

    def is_new(self, shape: torch.Size, device: torch.device) -> Tensor:
        """Which places hold no old entry, broadcastable to `shape`."""
        fresh = torch.zeros([1] * len(shape), dtype=torch.bool, device=device)
        for dimension, index in enumerate((self.rows, self.columns)):
            if index is not None:
                places = [1] * len(shape)
                places[dimension] = -1
                fresh = fresh | (index.to(device) < 0).view(places)
        return fresh


def take(old: Tensor, dimension: int, index: Tensor) -> Tensor:
    chosen = old.index_select(dimension, index.clamp_min(0))
    chosen.index_fill_(dimension, (index == NEW).nonzero().flatten(), 0)
    averaged = (index == MEAN).nonzero().flatten()
    if len(averaged):
        mean = old.mean(dimension, keepdim=True)
        chosen.index_copy_(dimension, averaged, mean.repeat_interleave(len(averaged), dimension))
    return chosen


def like(scale: float | Tensor, old: Tensor) -> float | Tensor:
    return scale.to(old) if isinstance(scale, Tensor) else scale


def added_rows(before: int, after: int) -> Tensor:
    """The old rows first, then new ones."""
    rows = torch.full((after,), NEW)
    rows[:before] = torch.arange(before)
    return rows
