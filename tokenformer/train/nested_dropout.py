"""Nested dropout over tokens: each step trains a random prefix, so that prefixes work alone.

    nested = NestedDropout(shares=(0.25, 0.5, 0.75, 1.0), seed=0)
    with nested.active(model, step):
        loss = model(...)                           # forward and backward on the prefix
        loss.backward()

The first tokens take part in every step and learn to work without the rest; the rest learn to
improve on them (Rippel et al., 2014, https://arxiv.org/abs/1402.0915, for the units of a hidden
layer). The share depends only on seed and step, so it is the same on every rank and after a resume.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from tokenformer.growth.tokens.prefix import active_share
from tokenformer.growth.tokens.token_counts import check_share
from tokenformer.models.seeds import named_seed


@dataclass(frozen=True)
class NestedDropout:
    shares: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)
    """Shares of the tokens of every layer, sampled uniformly. Must contain 1: otherwise the last
    tokens are never trained."""
    seed: int = 0

    def __post_init__(self) -> None:
        for share in self.shares:
            check_share("shares", share)
        if 1.0 not in self.shares:
            raise ValueError(f"shares={self.shares} must contain 1.0")

    def share(self, step: int) -> float:
        """Return the share of the tokens that `step` trains."""
        return self.shares[named_seed(self.seed, f"nested dropout {step}") % len(self.shares)]

    @contextmanager
    def active(self, model: nn.Module, step: int) -> Iterator[float]:
        """Restrict every layer to the share of `step` within the block; yields the share."""
        share = self.share(step)
        with active_share(model, share):
            yield share
