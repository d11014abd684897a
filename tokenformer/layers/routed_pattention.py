"""Routed Pattention: each input row attends to a few groups of the parameter tokens.

layer = RoutedPattention(768, 768, num_tokens=12288, group_size=32, active_groups=48)
y = layer(x)        # [..., 768] -> [..., 768]; a row visits 48 * 32 of the 12288 tokens
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from tokenformer.layers.pattention import Pattention
from tokenformer.layers.router import ROUTERS, CentroidRouter, LearnedRouter, Router
from tokenformer.ops.backends.streamed import gram_root
from tokenformer.ops.routed_pattention import check_norm, routed_pattention


class KeySummary(NamedTuple):
    """What routing needs of the keys."""

    centroids: Tensor  # [groups, d_in]
    gram_root: Tensor | None
    """Factor of the Gram matrix, for the norm over all tokens; None while the keys are trained."""


class RoutedPattention(Pattention):
    """`Pattention` in which a router chooses groups of tokens for every row.

    Args:
        group_size: tokens per group; groups are consecutive tokens, the last one may be smaller.
        active_groups: groups that each row attends to.
        router: `learned` scores the groups by a linear layer; `centroid` by their mean keys and has
            no parameters.
        norm: `all`, theta's norm over the scores of all tokens, for theta `l2_gelu` only; or
            `chosen`, over those of the chosen groups. With `chosen` the scale is the share of the
            tokens that are active times `scale_tokens`.
        balance_rate: how far a router's bias moves per optimizer step to balance the load;
            0 turns balancing off. See `balance_routers`.
        bias: whether to add a learned vector to the output, in place of the mean of the tokens that
            are skipped.

    The other arguments are those of `Pattention`.
    """

    router: Router
    bias: nn.Parameter | None  # [out_features]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_tokens: int,
        *,
        group_size: int = 32,
        active_groups: int,
        router: str = "learned",
        norm: str = "all",
        balance_rate: float = 0.01,
        bias: bool = False,
        theta: str = "l2_gelu",
        scale_tokens: float | Tensor | None = None,
        approximate: str = "none",
        eps: float = 0.0,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_groups(num_tokens, group_size, active_groups)
        if router not in ROUTERS:
            raise ValueError(f"router={router!r} is unknown; choose one of {', '.join(ROUTERS)}")
        # `reset_parameters`, which the next line calls, needs them.
        self.group_size, self._active_groups = group_size, active_groups
        super().__init__(
            in_features,
            out_features,
            num_tokens,
            theta=theta,
            scale_tokens=scale_tokens,
            approximate=approximate,
            eps=eps,
            device=device,
            dtype=dtype,
        )
        check_norm(norm, theta)
        self.norm, self.backend = norm, backend
        self.router = (
            CentroidRouter(self.num_groups, balance_rate=balance_rate, device=device)
            if router == "centroid"
            else LearnedRouter(
                self.num_groups, in_features, balance_rate=balance_rate, device=device, dtype=dtype
            )
        )
        self.bias = nn.Parameter(torch.zeros_like(self.value_tokens[0])) if bias else None
        self._summary: tuple[object, KeySummary] | None = None

    @property
    def num_groups(self) -> int:
        return -(-self.num_tokens // self.group_size)

    @property
    def active_groups(self) -> int:
        """Groups that each row attends to; can be changed at any time."""
        return self._active_groups

    @active_groups.setter
    def active_groups(self, count: int) -> None:
        check_groups(self.num_tokens, self.group_size, count)
        self._active_groups = count

    @property
    def tokens_per_row(self) -> int:
        return min(self.num_tokens, self._active_groups * self.group_size)

    @property
    def active_tokens(self) -> int | None:
        """Always None: the router, not a prefix, decides which tokens are active."""
        return None

    @active_tokens.setter
    def active_tokens(self, count: int | None) -> None:
        if count is not None:
            raise ValueError(
                f"active_tokens={count}: a routed layer has no active prefix of tokens; set its "
                "active_groups"
            )

    def forward(self, x: Tensor) -> Tensor:
        summary = self.key_summary()
        groups, gates = self.router(x, summary.centroids, self._active_groups)
        scale = self.scale_tokens
        if self.norm == "chosen":
            scale = scale * (self.tokens_per_row / self.num_tokens)  # exactly 1 if all are active
        out = routed_pattention(
            x,
            self.key_tokens,
            self.value_tokens,
            groups,
            group_size=self.group_size,
            norm=self.norm,
            gates=gates,
            scale_tokens=scale,
            theta=self.theta,
            approximate=self.approximate,
            eps=self.eps,
            gram_root=summary.gram_root,
            backend=self.backend,
        )
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def key_summary(self) -> KeySummary:
        """Return the summary of the keys. In evaluation mode it is kept until they change."""
        keys = self.key_tokens
        trains = self.training or torch.is_grad_enabled()
        if trains or torch.compiler.is_compiling() or keys.is_inference():
            return KeySummary(self.centroids(), None)
        version = (keys.data_ptr(), keys._version, keys.dtype)
        if self._summary is None or self._summary[0] != version:
            root = gram_root(keys) if self.norm == "all" else None
            self._summary = version, KeySummary(self.centroids(), root)
        return self._summary[1]

    @torch.no_grad()
    def centroids(self) -> Tensor:
        """Return the mean keys of the groups [groups, d_in]."""
        keys, size = self.key_tokens, self.group_size
        whole = self.num_tokens // size
        means = keys[: whole * size].unflatten(0, (whole, size)).mean(1)
        if whole == self.num_groups:
            return means
        return torch.cat([means, keys[whole * size :].mean(0, keepdim=True)])

    def train(self, mode: bool = True) -> "RoutedPattention":
        self._summary = None  # FSDP2 may gather other keys at the same address
        super().train(mode)
        return self

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, group_size={self.group_size}, "
            f"active_groups={self.active_groups}, norm={self.norm!r}"
        )


def check_groups(num_tokens: int, group_size: int, active_groups: int) -> None:
    if group_size < 1:
        raise ValueError(f"group_size={group_size} must be at least 1")
    count = -(-num_tokens // group_size)
    if not 0 <= active_groups <= count:
        raise ValueError(
            f"active_groups={active_groups} must be from 0 to {count}, the groups of "
            f"{group_size} of {num_tokens} tokens"
        )
