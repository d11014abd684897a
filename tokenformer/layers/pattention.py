"""The Pattention layer: a drop-in for `nn.Linear` whose weights are parameter tokens.

layer = Pattention(in_features=768, out_features=768, num_tokens=576)
y = layer(x)        # [..., 768] -> [..., 768]
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from tokenformer.ops.backends import joint
from tokenformer.ops.backends.native.fused import TokenGroup
from tokenformer.ops.pattention import check_names, check_scale, pattention
from tokenformer.ops.theta import ThetaOptions, accumulation_dtype


class TokenWeights(NamedTuple):
    """What a layer makes of its tokens for some rows, in fp32 or wider."""

    scores: Tensor  # [..., n], as they enter the norm
    ungated: Tensor  # [..., n], the weights before the gates of a router
    weights: Tensor  # [..., n], what the values are multiplied with; zero for skipped tokens


class Pattention(nn.Module):
    """Attends from every input row to `num_tokens` learnable key-value pairs.

    `scale_tokens` is stored with the layer and not recomputed from the token count: growth adds
    tokens and keeps the scale. Like the other constructor arguments it is not part of the state
    dict, unless it is an `nn.Parameter`, to be learned.

    `active_tokens` restricts the layer to its first m tokens; by default all are active:

        layer.active_tokens = 144     # of 576: a smaller layer
    """

    key_tokens: nn.Parameter  # [num_tokens, in_features]
    value_tokens: nn.Parameter  # [num_tokens, out_features]
    scale_tokens: float | Tensor  # a tensor if it is learned or annealed
    initial_scale: float  # of a learned scale, set by the model

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_tokens: int,
        *,
        theta: str = "l2_gelu",
        scale_tokens: float | Tensor | None = None,
        approximate: str = "none",
        eps: float = 0.0,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in [
            ("in_features", in_features),
            ("out_features", out_features),
            ("num_tokens", num_tokens),
        ]:
            if size < 1:
                raise ValueError(f"{name}={size} must be at least 1")
        check_names(theta, approximate, backend)
        self.theta = theta
        scale = num_tokens if scale_tokens is None else scale_tokens
        check_scale(scale)
        self.scale_tokens = scale if isinstance(scale, Tensor) else float(scale)
        self.approximate = approximate
        self.eps = eps
        self.backend = backend
        self._active_tokens: int | None = None
        self.key_tokens = nn.Parameter(
            torch.empty(num_tokens, in_features, device=device, dtype=dtype)
        )
        self.value_tokens = nn.Parameter(
            torch.empty(num_tokens, out_features, device=device, dtype=dtype)
        )
        self.reset_parameters()

    @property
    def in_features(self) -> int:
        return self.key_tokens.shape[1]

    @property
    def out_features(self) -> int:
        return self.value_tokens.shape[1]

    @property
    def num_tokens(self) -> int:
        return self.key_tokens.shape[0]

    @property
    def tokens_per_row(self) -> int:
        """Number of tokens that each input row attends to."""
        return self._active_tokens or self.num_tokens

    @property
    def active_tokens(self) -> int | None:
        """Number of active tokens, from the first; None for all, also after growth."""
        return self._active_tokens

    @active_tokens.setter
    def active_tokens(self, count: int | None) -> None:
        if count is not None and not 1 <= count <= self.num_tokens:
            raise ValueError(f"active_tokens={count} must be from 1 to {self.num_tokens}, or None")
        self._active_tokens = count

    def token_set(self) -> tuple[Tensor, Tensor, float | Tensor]:
        """Return the active keys, values and scale.

        The first m of n tokens get m/n of the scale. A new layer of m tokens has scale m where one
        of n tokens has n; and if tokens are similar, the first m have m/n of the squared norm (of
        the sum, for l1 and softmax), so each keeps the weight that it has among all n.
        """
        if self._active_tokens is None:
            return self.key_tokens, self.value_tokens, self.scale_tokens
        count = self._active_tokens
        share = count / self.num_tokens  # exactly 1 if all are active
        return self.key_tokens[:count], self.value_tokens[:count], self.scale_tokens * share

    def reset_parameters(self) -> None:
        """Normal keys with standard deviation 1/sqrt(d_in) and values with 1/sqrt(n), n the tokens
        that a row attends to: inputs of unit variance give outputs of order 1 for any number of
        tokens. Our models initialize in `_init_weights` instead."""
        if self.key_tokens.is_meta:  # there is no data, and torch would be slow
            return
        nn.init.normal_(self.key_tokens, std=self.in_features**-0.5)
        nn.init.normal_(self.value_tokens, std=max(1, self.tokens_per_row) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, *self.token_set())

    def attend(self, x: Tensor, keys: Tensor, values: Tensor, scale: float | Tensor) -> Tensor:
        """Attend to tokens with the options of this layer."""
        return pattention(
            x,
            keys,
            values,
            scale_tokens=scale,
            theta=self.theta,
            approximate=self.approximate,
            eps=self.eps,
            backend=self.backend,
        )

    def token_weights(self, x: Tensor) -> TokenWeights:
        """Return the weights of all tokens [..., n] by the reference formula, for rows of any
        dtype. The output is their product with the values, and the bias of a routed layer."""
        wide = accumulation_dtype(self.key_tokens.dtype)
        options = ThetaOptions(self.theta, self.scale_tokens, self.approximate, self.eps)
        scores = x.to(wide) @ self.key_tokens.to(wide).T
        weights = options.weights(scores)
        return TokenWeights(scores, weights, weights)

    def __prepare_scriptable__(self) -> nn.Module:
        """Called by `torch.jit.script`, which cannot compile the backend dispatch."""
        raise NotImplementedError(
            "torch.jit.script does not support Pattention; use torch.export, torch.compile or "
            "torch.jit.trace"
        )

    def extra_repr(self) -> str:
        scale = self.scale_tokens
        active = "" if self.active_tokens is None else f", active_tokens={self.active_tokens}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"num_tokens={self.num_tokens}, theta={self.theta!r}, "
            f"scale_tokens={'tensor' if isinstance(scale, Tensor) else f'{scale:g}'}{active}"
        )


DENSE_LAYERS: set[type[nn.Module]] = {Pattention}
"""Classes whose call without further arguments is Pattention over `token_set()`."""


def project_all(layers: Sequence[nn.Module], x: Tensor, *routing: Any) -> list[Tensor]:
    """Call several layers on one input, such as q, k and v; in one call where that is faster."""
    if not routing and not torch.compiler.is_compiling():
        groups = [group for layer in layers if (group := token_group(layer)) is not None]
        if len(groups) == len(layers) and joint.supports(x, groups):
            return joint.run(x, groups)
    return [layer(x, *routing) for layer in layers]


def token_group(layer: nn.Module) -> TokenGroup | None:
    """Return the tokens of a layer; None if calling it may do more than Pattention."""
    if type(layer) not in DENSE_LAYERS:
        return None
    assert isinstance(layer, Pattention)
    if layer.backend not in ("auto", "direct"):
        return None
    if "forward" in layer.__dict__ or has_hooks(layer):
        return None
    keys, values, scale = layer.token_set()
    if isinstance(scale, Tensor):
        return None
    return TokenGroup(keys, values, ThetaOptions(layer.theta, scale, layer.approximate, layer.eps))


def has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or torch_module._has_any_global_hook()
    )
