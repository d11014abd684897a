"""Stochastic depth: drops a residual branch for random samples of a training batch.

Huang et al., 2016, https://arxiv.org/abs/1603.09382.
"""

import torch
from torch import Tensor, nn


class DropPath(nn.Module):
    """Zeroes samples of the batch with probability `rate` and scales up the others."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"rate={rate} must be at least 0 and below 1")
        self.rate = rate

    def forward(self, branch: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return branch
        shape = [len(branch)] + [1] * (branch.ndim - 1)
        kept = torch.rand(shape, device=branch.device) >= self.rate
        return branch * (kept / (1 - self.rate)).to(branch.dtype)

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}"
