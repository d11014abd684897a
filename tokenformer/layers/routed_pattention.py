"""Routed Pattention: each input row attends to a few groups of the parameter tokens.

layer = RoutedPattention(768, 768, num_tokens=12288, group_size=32, active_groups=48)
y = layer(x)        # [..., 768] -> [..., 768]; a row visits 48 * 32 of the 12288 tokens
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tokenformer.layers.pattention import Pattention, TokenWeights, has_hooks
from tokenformer.layers.router import (
    LINEAR_ROUTERS,
    ROUTERS,
    CentroidRouter,
    GatedRouter,
    LearnedRouter,
    Router,
    directions_of,
)
from tokenformer.ops.backends.auto import can_use_native, is_plain
from tokenformer.ops.backends.native import few_rows
from tokenformer.ops.backends.native.library import Tokens
from tokenformer.ops.backends.native.routed import routing
from tokenformer.ops.backends.score_norm import exact_gram_root, pack_upper, unpack_upper
from tokenformer.ops.routed_pattention import check_norm, dense_weights, routed_pattention
from tokenformer.ops.theta import ThetaOptions, accumulation_dtype


class KeySummary(NamedTuple):
    """What routing needs of the keys."""

    directions: Tensor | None  # [groups, d_in]
    """Of the mean keys of the groups; None if the router does not use them."""
    gram_root: Tensor | None
    """Factor of the Gram matrix, packed, for the norm over all tokens; None while the keys are
    trained."""


class GroupRouting:
    """The groups of a layer's tokens: of `RoutedPattention` and of quantized layers made of it."""

    num_tokens: Any
    in_features: Any
    scale_tokens: Any
    group_size: int
    norm: str
    router: Router
    bias: Tensor | None
    _active_groups: int

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
    def routed_scale(self) -> float | Tensor:
        """The scale of the tokens in the norm."""
        if self.norm == "all":
            return self.scale_tokens
        share = max(1, self.tokens_per_row) / self.num_tokens  # exactly 1 if all are active
        return self.scale_tokens * share

    @property
    def root_rows(self) -> int:
        """Rows of the factor of the Gram matrix."""
        return min(self.num_tokens, self.in_features)

    def unpacked(self, gram_root: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """Return the factor of the Gram matrix for rows of this dtype."""
        if gram_root is None:
            return None
        wide = gram_root.to(accumulation_dtype(dtype))
        return unpack_upper(wide, self.root_rows, self.in_features)

    def describe_routing(self) -> str:
        return (
            f"group_size={self.group_size}, active_groups={self.active_groups}, norm={self.norm!r}"
        )

    def has_plain_router(self) -> bool:
        """Whether native code can do what calling the router does."""
        parts = (*self.router.parameters(), self.router.bias)
        return (
            type(self.router) in NATIVE_ROUTERS
            and "forward" not in self.router.__dict__
            and not has_hooks(self.router)
            and is_plain(*parts, *(() if self.bias is None else (self.bias,)))
        )


NATIVE_ROUTERS: set[type[nn.Module]] = {CentroidRouter, GatedRouter, LearnedRouter}


class RoutedPattention(GroupRouting, Pattention):
    """`Pattention` in which a router chooses groups of tokens for every row.

    Args:
        group_size: tokens per group; groups are consecutive tokens, the last one may be smaller.
        active_groups: groups that each row attends to.
        router: `gated` scores the groups by a linear layer, and a group's score also scales what
            its tokens add; `learned` scores them by a linear layer; `centroid` by their mean keys
            and has no parameters.
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
        router: str = "gated",
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
            else LINEAR_ROUTERS[router](
                self.num_groups, in_features, balance_rate=balance_rate, device=device, dtype=dtype
            )
        )
        self.bias = nn.Parameter(torch.zeros_like(self.value_tokens[0])) if bias else None
        self._summary: tuple[object, KeySummary] | None = None

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
        pointers = self.pointers(summary) if self.supports_native(x) else None
        if pointers is not None:
            theta = few_rows.theta_struct(self.theta, self.approximate, self.eps)
            return few_rows.pattention(x, pointers, self.key_tokens.dtype, theta)
        return self.attend_to_groups(x, summary)

    def attend_with_added(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend to added tokens, too, which every row visits and which share the norm: keys
        [m, d_in] and values [m, d_out], or [B, m, ...] for others in every sample."""
        return self.attend_to_groups(x, self.key_summary(), (keys, values))

    def attend_to_groups(
        self, x: Tensor, summary: KeySummary, added: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        groups, gates = self.choose_groups(x, summary.directions)
        out = routed_pattention(
            x,
            self.key_tokens,
            self.value_tokens,
            groups,
            group_size=self.group_size,
            norm=self.norm,
            gates=gates,
            added=added,
            scale_tokens=self.routed_scale,
            theta=self.theta,
            approximate=self.approximate,
            eps=self.eps,
            gram_root=self.unpacked(summary.gram_root, x.dtype),
            backend=self.backend,
        )
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def choose_groups(self, x: Tensor, directions: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the groups of every row and their gates; count the rows of a group for the load
        balancing. A layer that is frozen, as below an adapter, is not balanced: it would choose
        other groups than before."""
        groups, gates = self.router(x, directions, self._active_groups)
        trained = (self.key_tokens, *self.router.parameters())
        if self.training and torch.is_grad_enabled() and all(p.requires_grad for p in trained):
            self.router.count(groups)
        return groups, gates

    def token_weights(self, x: Tensor) -> TokenWeights:
        groups, gates = self.router(x, self.directions(), self._active_groups)
        wide = accumulation_dtype(self.key_tokens.dtype)
        options = ThetaOptions(self.theta, self.routed_scale, self.approximate, self.eps)
        scores = x.to(wide) @ self.key_tokens.to(wide).T
        found = dense_weights(scores, groups, gates, None, options, self.group_size, self.norm)
        return TokenWeights(found.scores, found.ungated, found.weights)

    def supports_native(self, x: Tensor) -> bool:
        """Whether native code can route these rows and attend to their tokens, with `pointers`."""
        return (
            self.keeps_summary()
            and self.backend == "auto"
            and not isinstance(self.scale_tokens, Tensor)
            and self.has_plain_router()
            and can_use_native(x, self.key_tokens, self.value_tokens)
        )

    def pointers(self, summary: KeySummary) -> Tokens | None:
        """Return pointers for native code, valid as long as the summary; None if it cannot use
        them."""
        tokens = few_rows.token_pointers(self.key_tokens, self.value_tokens, self.routed_scale)
        found = routing(
            self.group_size,
            self._active_groups,
            router=self.router.rows(summary.directions),
            bias=self.router.bias,
            root=summary.gram_root,
            root_rows=self.root_rows,
            is_gated=self.router.is_gated,
            shift=self.bias,
        )
        if found is None:
            return None
        tokens.routing = found
        return tokens

    def keeps_summary(self) -> bool:
        """Whether the keys stay the same, as in evaluation."""
        changing = self.training or torch.is_grad_enabled() or torch.compiler.is_compiling()
        # Keys that LoRA computes anew for every call may get the address of earlier ones.
        changing = changing or "key_tokens" not in self._parameters
        return not changing and not self.key_tokens.is_inference()

    def key_summary(self) -> KeySummary:
        """Return the summary of the keys. In evaluation mode it is kept until they change."""
        if not self.keeps_summary():
            return KeySummary(self.directions(), None)
        keys = self.key_tokens
        version = (keys.data_ptr(), keys._version, keys.dtype, self.norm)
        if self._summary is None or self._summary[0] != version:
            root = pack_upper(exact_gram_root(keys)) if self.norm == "all" else None
            self._summary = version, KeySummary(self.directions(), root)
        return self._summary[1]

    @torch.no_grad()
    def directions(self) -> Tensor | None:
        """Return the mean keys of the groups [groups, d_in] at unit length, for a router that has
        no parameters."""
        if isinstance(self.router, LearnedRouter):
            return None
        return directions_of(group_means(self.key_tokens, self.group_size))

    def train(self, mode: bool = True) -> "RoutedPattention":
        if mode:
            self._summary = None  # FSDP2 may gather other keys at the same address
        super().train(mode)
        return self

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.describe_routing()}"


def group_means(keys: Tensor, group_size: int) -> Tensor:
    """Return the mean keys [groups, d] of consecutive tokens [n, d]."""
    whole = len(keys) // group_size
    means = keys[: whole * group_size].unflatten(0, (whole, group_size)).mean(1)
    rest = keys[whole * group_size :]
    return torch.cat([means, rest.mean(0, keepdim=True)]) if len(rest) else means


def check_groups(num_tokens: int, group_size: int, active_groups: int) -> None:
    if group_size < 1:
        raise ValueError(f"group_size={group_size} must be at least 1")
    count = -(-num_tokens // group_size)
    if not 0 <= active_groups <= count:
        raise ValueError(
            f"active_groups={active_groups} must be from 0 to {count}, the groups of "
            f"{group_size} of {num_tokens} tokens"
        )
