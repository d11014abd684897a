"""Routers: which groups of tokens an input row attends to.

A router scores every group for every row; the groups with the largest scores are chosen. Rows are
scaled to unit mean square, because Pattention sees little but their direction, and scores have a
standard deviation of about 1 at the start.

Load balancing needs no auxiliary loss (Wang et al., arXiv 2408.15664): a bias per group is added to
the scores when groups are chosen, and only then. After every optimizer step `update` raises the
bias of the groups that fewer rows chose than average, and lowers the others. Groups that no row
chose, as after growth, rise faster. The bias is a buffer: part of the state dict, not trained by
gradients.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenformer.ops.backends.autograd import no_autocast
from tokenformer.ops.theta import accumulation_dtype

DEAD_STEP = 5.0
"""How much further than others the bias of a group moves that no row chose."""


class Router(nn.Module):
    is_gated = False
    """Whether the weights of a group's tokens are multiplied by twice the sigmoid of its score."""
    bias: Tensor
    """[groups], added to the scores when groups are chosen."""

    def __init__(
        self, num_groups: int, *, balance_rate: float, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.num_groups = num_groups
        self.balance_rate = balance_rate
        self.register_buffer("bias", torch.zeros(num_groups, dtype=torch.float32, device=device))
        # Not a buffer: DDP would overwrite the counts of all ranks with those of the first.
        self.counts: Tensor | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Keep the bias in fp32 in a model that moves to a half dtype: one step of the balancing is
        less than bf16 can add to it."""
        before = self.bias
        super()._apply(fn, recurse)
        if self.bias.dtype in (torch.bfloat16, torch.float16):
            kept = before.to(self.bias.device) if not before.is_meta else self.bias
            self.bias = kept.float()
        return self

    def forward(self, x: Tensor, directions: Tensor | None, k: int) -> tuple[Tensor, Tensor | None]:
        """Return the k groups of every row of `x` [..., d], and their gates; None for gates of 1.
        A router without parameters needs the `directions` [groups, d] of the groups."""
        with no_autocast(x):
            scores = self.scores(self.normalized(x), directions)  # [..., groups]
            groups = largest(scores.detach() + self.bias, k)  # [..., k]
            return groups, self.gates(scores, groups)

    def scores(self, x: Tensor, directions: Tensor | None) -> Tensor:
        """Return the scores [..., groups] of normalized rows."""
        return x @ self.rows(directions).to(x.dtype).T

    @abstractmethod
    def rows(self, directions: Tensor | None) -> Tensor:
        """Return what a normalized row is multiplied with [groups, d]."""

    def gates(self, scores: Tensor, groups: Tensor) -> Tensor | None:
        """Return the factors of the weights of the chosen groups; None for 1."""
        return 2 * scores.gather(-1, groups).sigmoid() if self.is_gated else None

    @staticmethod
    def normalized(x: Tensor) -> Tensor:
        wide = x.to(accumulation_dtype(x.dtype))
        return F.rms_norm(wide, wide.shape[-1:])

    @torch.no_grad()
    def count(self, groups: Tensor) -> None:
        """Add the rows that chose each group, until the next `update`; a layer calls it while it is
        trained. Activation checkpointing
        counts every row twice, which changes neither the signs nor the shares."""
        if self.counts is None or self.counts.device != groups.device:
            self.counts = torch.zeros(self.num_groups, device=groups.device, dtype=torch.int64)
        chosen = groups.reshape(-1)
        self.counts.index_add_(0, chosen, torch.ones_like(chosen))

    @torch.no_grad()
    def update(self, counts: Tensor) -> None:
        """Move the bias of every group towards a balanced load, given the rows [groups] that chose
        each."""
        step = torch.sign(counts.double().mean() - counts)
        step[counts == 0] *= DEAD_STEP
        self.bias += (self.balance_rate * (step - step.mean())).to(self.bias)

    def extra_repr(self) -> str:
        return f"num_groups={self.num_groups}, balance_rate={self.balance_rate:g}"


class CentroidRouter(Router):
    """The score of a group is the cosine of a row and its mean key, times sqrt(d). It has no
    parameters and moves with the keys."""

    def rows(self, directions: Tensor | None) -> Tensor:
        assert directions is not None
        return directions


class LearnedRouter(Router):
    """A linear layer scores the groups.

    The gates are exactly 1, so the output is that of the chosen tokens; the gradient passes to the
    scores as if the gates were the sigmoids of the scores (a straight-through estimator): the score
    of a group rises where a larger share of its output would lower the loss.
    """

    weight: nn.Parameter  # [groups, d]

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        *,
        balance_rate: float,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_groups, balance_rate=balance_rate, device=device)
        self.weight = nn.Parameter(torch.empty(num_groups, in_features, device=device, dtype=dtype))
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=in_features**-0.5)

    def rows(self, directions: Tensor | None) -> Tensor:
        return self.weight

    def gates(self, scores: Tensor, groups: Tensor) -> Tensor | None:
        if not torch.is_grad_enabled():
            return None
        shares = scores.gather(-1, groups).sigmoid()
        return 1 + (shares - shares.detach())


class GatedRouter(LearnedRouter):
    """A linear layer scores the groups, and the weights of a group's tokens are multiplied by its
    gate, twice the sigmoid of its score.

    The gradient of the router is exact, and a group that hardly fits a row adds little to it. With
    all groups active the layer is a dense one only if all scores are zero.
    """

    is_gated = True

    def gates(self, scores: Tensor, groups: Tensor) -> Tensor | None:
        return Router.gates(self, scores, groups)


LINEAR_ROUTERS = {"gated": GatedRouter, "learned": LearnedRouter}
ROUTERS = ("centroid", *LINEAR_ROUTERS)


def directions_of(centroids: Tensor) -> Tensor:
    """Return the mean keys [groups, d] at unit length; a mean of zero stays zero."""
    wide = centroids.to(accumulation_dtype(centroids.dtype))
    return F.normalize(wide, dim=-1).to(centroids.dtype)


def largest(scores: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest scores [..., n], in any order. Of equal ones the first
    are taken; `topk` leaves that open, so that native code could not choose the same."""
    order = (scores.float() + 0.0).view(torch.int32)  # without negative zeros
    order ^= (order >> 31).bitwise_and_(0x7FFFFFFF)  # integers in the order of the numbers
    ranks = order.long().bitwise_left_shift_(32)
    ranks -= torch.arange(scores.shape[-1], device=scores.device)
    return ranks.topk(k, sorted=False).indices


class RouterLoad(NamedTuple):
    """How evenly the routers of a model used their groups in one optimizer step."""

    groups: int
    dead: int
    """Groups that no row chose."""
    peak: float
    """Rows of the most chosen group of any layer, relative to the mean of the layer."""


def routers(model: nn.Module) -> Iterator[Router]:
    for module in model.modules():
        if isinstance(module, Router):
            yield module


def routing_biases(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the biases of all routers by name. They are not parameters, but a model in which they
    differ chooses other groups."""
    for name, module in model.named_modules():
        if isinstance(module, Router):
            yield f"{name}.bias", module.bias


def balance_routers(
    model: nn.Module, sum_over_ranks: Callable[[Tensor], Tensor] = lambda counts: counts
) -> RouterLoad | None:
    """Update the biases of all routers of a model and reset their counts. Call it after every
    optimizer step; our training loop does. Returns None if nothing was counted."""
    counted = [router for router in routers(model) if router.counts is not None]
    if not counted:
        return None
    counts = sum_over_ranks(torch.cat([router.counts for router in counted]))  # type: ignore[misc]
    by_router = counts.split([router.num_groups for router in counted])
    for router, own in zip(counted, by_router, strict=True):
        router.update(own)
    reset_counts(model)
    dead = int((counts == 0).sum())
    peak = max((own.max() / own.double().mean().clamp_min(1)).item() for own in by_router)
    return RouterLoad(len(counts), dead, peak)


def reset_counts(model: nn.Module) -> None:
    for router in routers(model):
        if router.counts is not None:
            router.counts.zero_()
