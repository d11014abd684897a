"""The parameter tokens of one layer, and where a model's token layers are."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tokenformer.growth.parameter_mapping import NEW, ParameterMapping
from tokenformer.growth.tokens.token_counts import (
    LayerProjection,
    check_dense,
    check_no_thresholds,
    check_not_joint,
    check_not_quantized,
)
from tokenformer.layers.pattention import Pattention
from tokenformer.models.configuration import TokenConfig

FROZEN_ENCODER = "images.encoder."
"""In the names of the layers of a vision encoder; see `ProjectedImages` in
`models/image_text.py`."""


@dataclass(frozen=True)
class TokenSet:
    """The tokens of one layer and their scale."""

    keys: Tensor  # [n, d_in]
    values: Tensor  # [n, d_out]
    scale: float

    @property
    def size(self) -> int:
        return self.keys.shape[0]

    @classmethod
    def of(cls, module: Pattention, device: torch.device | None = None) -> "TokenSet":
        """Return all tokens of a layer, active or not, and its current scale."""
        keys, values = module.key_tokens.detach(), module.value_tokens.detach()
        return cls(keys.to(device), values.to(device), float(module.scale_tokens))


@dataclass(frozen=True)
class Replacement:
    """A layer's new tokens, and the old row each one comes from (NEW for none)."""

    tokens: TokenSet
    rows: Tensor  # [n']
    value_scale: float | Tensor = 1.0
    """Factor on the old values: one number, or one per row [n', 1]."""
    new_rates: list[float] | None = None
    """Learning rate factors of the new rows, in order; by default 1."""
    active_groups: int | None = None
    """Groups that a row visits, of a routed layer; by default as before."""

    def rates(self, before: list[float] | None) -> list[float]:
        """Return the learning rate factor of every row, given those of the old rows."""
        if before is None and self.new_rates is None:
            return [1.0] * len(self.rows)
        new_rates = iter(self.new_rates or [])
        return [
            next(new_rates, 1.0) if row == NEW else (1.0 if before is None else before[row])
            for row in self.rows.tolist()
        ]

    def ages(self, before: list[int], newest: int) -> list[int]:
        """Return the growth that added each row, given those of the old rows. `newest` is this
        growth: it adds the rows without an old one, and further copies of an old one."""
        seen, found = set[int](), []
        for row in self.rows.tolist():
            found.append(newest if row == NEW or row in seen else before[row])
            seen.add(row)
        return found

    def mappings(self, layer: str) -> dict[str, ParameterMapping]:
        keys, values = f"{layer}.key_tokens", f"{layer}.value_tokens"
        return {
            # A key's gradient is proportional to its value.
            keys: ParameterMapping(keys, self.rows, gradient_scale=self.value_scale),
            values: ParameterMapping(values, self.rows, scale=self.value_scale),
        }


def token_layers(model: nn.Module) -> dict[str, tuple[LayerProjection, Pattention]]:
    """Return the Pattention layers by name, each with its projection and layer number, without
    those of a frozen vision encoder, which has layers with the same numbers."""
    return {
        name: (layer_place(name), module)
        for name, module in model.named_modules()
        if isinstance(module, Pattention) and FROZEN_ENCODER not in name
    }


def layer_place(name: str) -> LayerProjection:
    """Return the projection and layer number of a Pattention layer, by its name in a model."""
    words = name.split(".")
    return words[-1], next(int(word) for word in words if word.isdigit())


def check_whole(model: nn.Module) -> None:
    """Raise if layers use only the first of their tokens."""
    for name, (_, layer) in token_layers(model).items():
        if layer.active_tokens is not None:
            raise ValueError(
                f"{name} uses {layer.active_tokens} of its {layer.num_tokens} tokens; set "
                "active_tokens to None, or cut the model first (take_prefix)"
            )


def check_tokenformer(model: nn.Module, verb: str, *, routed: bool = False) -> None:
    """Raise unless the model is a TokenFormer that is neither quantized nor sparse; with `routed`
    some of its layers may be routed."""
    config = getattr(model, "config", None)
    if not isinstance(config, TokenConfig):
        raise TypeError(f"only a TokenFormer's tokens {verb}, not a {type(model).__name__}'s")
    check_not_quantized(config)
    check_not_joint(config)
    if routed:
        check_no_thresholds(config, verb)
    else:
        check_dense(config, verb)
