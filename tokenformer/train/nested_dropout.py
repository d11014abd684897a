"""Nested dropout over tokens: every step trains a prefix of them, so that prefixes work alone.

    nested = NestedDropout(shares=(0.25, 0.5, 0.75, 1.0), seed=0)
    nested.apply(model, step)                       # before the forward pass of that step

The first tokens take part in every step and learn to do without the rest; the rest learn to add to
them (Rippel et al., 2014, https://arxiv.org/abs/1402.0915, for the units of a hidden layer). Which
share a step trains follows from the seed and the step alone: a resumed run takes the same, and so
does every process of it. Validate with `set_active_share(model, None)`, or at each share.
"""

from dataclasses import dataclass
from typing import Any

from tokenformer.growth.tokens.prefix import set_active_share
from tokenformer.growth.tokens.token_counts import check_share
from tokenformer.models.seeds import named_seed


@dataclass(frozen=True)
class NestedDropout:
    shares: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)
    """Of the tokens of every layer, drawn with equal chances; 1 belongs to them, or the last
    tokens are never trained."""
    seed: int = 0

    def __post_init__(self) -> None:
        for share in self.shares:
            check_share("shares", share)
        if 1.0 not in self.shares:
            raise ValueError(f"shares={self.shares} must have 1.0 among them")

    def share(self, step: int) -> float:
        """The share that `step` trains."""
        return self.shares[named_seed(self.seed, f"nested dropout {step}") % len(self.shares)]

    def apply(self, model: Any, step: int) -> float:
        """Set the active tokens of every layer for `step`; returns their share."""
        share = self.share(step)
        set_active_share(model, share)
        return share
