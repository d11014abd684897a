"""A Pattention layer with the added tokens of any number of adapters.

With `norm="shared"` the tokens of the active adapters are concatenated with those of the layer:

    theta(x [K, K_a, K_b]^T) [V; V_a; V_b]        with the scale of the layer

so several adapters that are active together equal the same adapters merged. With `norm="own"` each
is a Pattention of its own, whose output is added. The layer itself is never changed, except by
`merge`, which `unmerge` takes back.

In a routed layer the sum over the old tokens is one over the groups that a row chose, and the new
tokens are active in every row.
"""

from collections.abc import Iterable, Sequence
from typing import Any
from zlib import crc32

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn

from tokenformer.adapters.adapter_config import TokenAdapterConfig
from tokenformer.layers.modality_pattention import ModalityPattention, ModalityRows
from tokenformer.layers.pattention import Pattention
from tokenformer.layers.quantized import QuantizedPattention
from tokenformer.layers.routed_pattention import GroupRouting
from tokenformer.layers.sharded import ShardedPattention
from tokenformer.layers.thresholded_pattention import ThresholdedPattention
from tokenformer.ops import pattention
from tokenformer.ops.added_tokens import pattention_per_sample, pattention_with_added
from tokenformer.ops.theta import ThetaOptions

TokenLayer = Pattention | QuantizedPattention
BASE = "__base__"
"""peft's name for a sample of a mixed batch that has no adapter."""


class SampleAdapters(list[str]):
    """The names of the adapters of a batch, one per sample, with their tokens by layer: a batch
    decodes many tokens with the same adapters."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(names)
        self.tokens: dict[Any, dict[str, tuple[Tensor, ...]]] = {}
        self.modules: list[nn.Module] = []
        """The modules that take these names; found at first use."""


class TokenAdapterLayer(nn.Module, BaseTunerLayer):
    adapter_layer_names = ("token_adapter_keys", "token_adapter_values")
    other_param_names = ("token_adapter_norms",)

    base_layer: TokenLayer

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        config: TokenAdapterConfig,
        name: str,
        merge_row: int | None = None,
    ) -> None:
        """`merge_row` is where merged tokens are inserted, by default at the end."""
        super().__init__()
        if not isinstance(base_layer, TokenLayer):
            raise TypeError(
                f"target_modules: {name} is a {type(base_layer).__name__}; tokens can be added to "
                "the Pattention layers of a TokenFormer: ffn, q, k, v, o"
            )
        if isinstance(base_layer, ShardedPattention):
            raise ValueError(
                f"{name} is sharded by tensor parallelism, which token adapters do not support; "
                "load the model without it"
            )
        self.base_layer = base_layer
        self.name = name
        self.merge_row = merge_row
        self.token_adapter_keys = nn.ParameterDict()
        self.token_adapter_values = nn.ParameterDict()
        self.token_adapter_norms: dict[str, str] = {}
        self.merged_adapters: list[str] = []
        self.update_layer(adapter_name, config)

    def update_layer(
        self, adapter_name: str, config: TokenAdapterConfig, inference_mode: bool = False
    ) -> None:
        """Add the tokens of an adapter."""
        base = self.base_layer
        if config.norm == "shared" and base.theta == "softmax":
            raise ValueError(
                "norm='shared': with theta softmax a token with a zero key has a weight, so adding "
                "it changes the output; use norm='own'"
            )
        if config.norm == "shared" and isinstance(base, ThresholdedPattention):
            raise ValueError(
                f"norm='shared': {self.name} skips tokens by a threshold (config.thresholds), and "
                "new ones could not learn; use norm='own'"
            )
        if self.merged:
            raise ValueError(f"{self.name} has merged adapters; unmerge them first")
        generator = None
        if config.init_seed is not None:
            own = crc32(self.name.encode())  # or all layers would have the same tokens
            generator = torch.Generator().manual_seed(config.init_seed + own)
        count = config.num_tokens
        keys = torch.zeros(count, base.in_features)
        values = torch.zeros(count, base.out_features)
        if config.init == "random" or config.norm == "own":
            keys.normal_(std=base.in_features**-0.5, generator=generator)
        if config.init == "random" or config.norm == "shared":
            values.normal_(std=value_std(base), generator=generator)
        self.token_adapter_keys[adapter_name] = nn.Parameter(keys)
        self.token_adapter_values[adapter_name] = nn.Parameter(values)
        self.token_adapter_norms[adapter_name] = config.norm
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=inference_mode)

    def _get_base_layer_device_and_dtype(
        self, base_layer: TokenLayer
    ) -> tuple[torch.device, torch.dtype]:
        tokens = base_layer.key_tokens
        if isinstance(base_layer, QuantizedPattention):
            return tokens.device, base_layer.key_scales.dtype
        return tokens.device, tokens.dtype

    def forward(
        self,
        x: Tensor,
        rows: ModalityRows | None = None,
        *,
        adapter_names: Sequence[str] | None = None,
        **options: Any,
    ) -> Tensor:
        """`rows` are those of a joint model, whose rows of images attend to other tokens of the
        layer than those of text; both attend to all added ones."""
        routing = () if rows is None else (rows,)
        if self.disable_adapters:
            if self.merged:
                self.unmerge()
            return self.base_layer(x, *routing)
        if adapter_names is not None:
            if self.merged:
                raise ValueError("adapter_names needs adapters that are not merged")
            if rows is not None:
                raise ValueError(
                    "adapter_names is for text; for a batch with images of a joint model, choose "
                    "one adapter: model.set_adapter"
                )
            return self.forward_mixed(x, adapter_names)
        if self.merged:
            return self.base_layer(x, *routing)
        active = [name for name in self.active_adapters if name in self.token_adapter_keys]
        shared = [name for name in active if self.token_adapter_norms[name] == "shared"]
        output = self.forward_shared(x, shared, rows) if shared else self.base_layer(x, *routing)
        for name in active:
            if self.token_adapter_norms[name] == "own":
                output = output + self.forward_own(x, name)
        return output

    def forward_shared(
        self, x: Tensor, names: Sequence[str], rows: ModalityRows | None = None
    ) -> Tensor:
        base = self.base_layer
        if rows is None:
            return self.attend(x, base_tokens(base, x.dtype), names)
        assert isinstance(base, ModalityPattention)
        return rows.route(
            x,
            lambda image: self.attend(image, base.vision_token_set(), names),
            lambda text: self.attend(text, base.token_set(), names),
        )

    def attend(
        self, x: Tensor, tokens: tuple[Tensor, Tensor, float | Tensor], names: Sequence[str]
    ) -> Tensor:
        """Attend to tokens of the layer, and to those of adapters."""
        keys, values, scale = tokens
        added_keys, added_values = self.joined(names, keys.dtype)
        if torch.is_grad_enabled() and added_keys.requires_grad:  # the fused kernels are faster
            return pattention(
                x,
                torch.cat([keys, added_keys]),
                torch.cat([values, added_values]),
                scale_tokens=scale,
                theta=self.base_layer.theta,
                approximate=self.base_layer.approximate,
                eps=self.base_layer.eps,
                backend=self.base_layer.backend,
            )
        return pattention_with_added(
            x, keys, values, added_keys, added_values, self.theta_options(scale)
        )

    def forward_own(self, x: Tensor, name: str) -> Tensor:
        keys, values = self.joined([name], x.dtype)
        return pattention(
            x,
            keys,
            values,
            theta=self.base_layer.theta,
            approximate=self.base_layer.approximate,
            eps=self.base_layer.eps,
        )

    def forward_mixed(self, x: Tensor, adapter_names: Sequence[str]) -> Tensor:
        """Every sample has the adapter of its own name."""
        if len(adapter_names) != x.shape[0]:
            raise ValueError(
                f"adapter_names has {len(adapter_names)} names for {x.shape[0]} samples; give one "
                "for each"
            )
        tokens = self.tokens_by_sample(adapter_names, x.dtype)
        shared = tokens.get("shared")
        output = self.base_layer(x) if shared is None else self.attend_with_added(x, *shared)
        if "own" in tokens:
            keys, values, counts = tokens["own"]
            options = self.theta_options(1.0)  # the scale is the count
            output = output + pattention_per_sample(x, keys, values, counts, options)
        return output

    def attend_with_added(self, x: Tensor, added_keys: Tensor, added_values: Tensor) -> Tensor:
        """Attend to the tokens of the layer and to added ones, which may be other ones in every
        sample; for inference."""
        keys, values, scale = base_tokens(self.base_layer, x.dtype)
        options = self.theta_options(scale)
        return pattention_with_added(x, keys, values, added_keys, added_values, options)

    def tokens_by_sample(
        self, adapter_names: Sequence[str], dtype: torch.dtype
    ) -> dict[str, tuple[Tensor, ...]]:
        """Return by norm the keys [B, m, d_in] and values [B, m, d_out] of every sample, padded
        with zeros, and for `own` norms the counts [B]. If all samples have the same adapter, these
        are its keys [m, d_in] and values [m, d_out]: one matrix product for all of them."""
        cache = getattr(adapter_names, "tokens", {}) if not torch.is_grad_enabled() else {}
        place = (id(self), dtype)
        if place in cache:
            return cache[place]
        found: dict[str, tuple[Tensor, ...]] = {}
        for norm in ("shared", "own"):
            names = [
                name if self.token_adapter_norms.get(name) == norm else None
                for name in adapter_names
            ]
            if any(name is not None for name in names):
                parts = self.token_adapter_keys, self.token_adapter_values
                keys, values = (stack([part[n] if n else None for n in names]) for part in parts)
                found[norm] = keys.to(dtype), values.to(dtype)
                if norm == "own":
                    most = keys.shape[-2]  # for a sample without: zero values have no effect
                    counts = [self.token_adapter_keys[n].shape[0] if n else most for n in names]
                    found[norm] += (torch.tensor(counts, device=keys.device),)
        cache[place] = found
        return found

    def joined(self, names: Sequence[str], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the keys and values of adapters, in the dtype of the base: peft may keep those of
        a half-precision base in fp32."""
        parts = (self.token_adapter_keys, self.token_adapter_values)
        found = [[part[name] for name in names] for part in parts]
        keys, values = (part[0] if len(part) == 1 else torch.cat(part) for part in found)
        return keys.to(dtype), values.to(dtype)

    def theta_options(self, scale: float | Tensor) -> ThetaOptions:
        base = self.base_layer
        return ThetaOptions(base.theta, scale, base.approximate, base.eps)

    def check_merge(self, safe_merge: bool, adapter_names: list[str] | None) -> list[str]:
        """Return the adapters of this layer that `merge` would merge; raise if it could not."""
        base = self.base_layer
        wanted = check_adapters_to_merge(self, adapter_names) or []
        names = [name for name in wanted if name in self.token_adapter_keys]
        for name in names:
            if isinstance(base, QuantizedPattention):
                raise ValueError(
                    "tokens cannot be merged into a quantized base; load it unquantized"
                )
            if self.token_adapter_norms[name] == "own":
                raise ValueError(
                    f"adapter {name!r} has a norm of its own, which the tokens of a layer do not "
                    "have; keep it attached, or train one with norm='shared'"
                )
            if base.active_tokens is not None:
                raise ValueError(f"{self.name} has inactive tokens; make all active to merge")
            tokens = self.joined([name], torch.float32)
            if safe_merge and not all(part.isfinite().all() for part in tokens):
                raise ValueError(f"adapter {name!r} has tokens that are not finite")
        return names

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add the tokens of adapters to those of the layer, which keeps its scale."""
        base = self.base_layer
        for name in self.check_merge(safe_merge, adapter_names):
            row = base.num_tokens if self.merge_row is None else self.merge_row
            parts = (base.key_tokens, base.value_tokens)
            added = self.joined([name], base.key_tokens.dtype)
            set_tokens(
                base,
                *(
                    torch.cat([old.data[:row], new.detach(), old.data[row:]])
                    for old, new in zip(parts, added, strict=True)
                ),
            )
            self.merged_adapters.append(name)

    def unmerge(self) -> None:
        """Remove the tokens that were merged."""
        base = self.base_layer
        while self.merged_adapters:
            count = self.token_adapter_keys[self.merged_adapters.pop()].shape[0]
            row = base.num_tokens - count if self.merge_row is None else self.merge_row
            parts = (base.key_tokens.data, base.value_tokens.data)
            set_tokens(base, *(torch.cat([old[:row], old[row + count :]]) for old in parts))

    def __repr__(self) -> str:
        return f"token_adapter.{super().__repr__()}"


class RoutedAdapterLayer(TokenAdapterLayer):
    """Adapters of a layer whose router chooses groups of tokens. Their own tokens are in no group:
    every row attends to them, and with `norm="shared"` they are in the norm of the others. So they
    cannot be merged."""

    def forward_shared(
        self, x: Tensor, names: Sequence[str], rows: ModalityRows | None = None
    ) -> Tensor:
        base = self.base_layer
        tokens = x if isinstance(base, QuantizedPattention) else base.key_tokens
        return self.attend_with_added(x, *self.joined(names, tokens.dtype))

    def attend_with_added(self, x: Tensor, added_keys: Tensor, added_values: Tensor) -> Tensor:
        base: Any = self.base_layer
        output: Tensor = base.attend_with_added(x, added_keys, added_values)
        return output

    def check_merge(self, safe_merge: bool, adapter_names: list[str] | None) -> list[str]:
        if names := super().check_merge(safe_merge, adapter_names):
            raise ValueError(
                f"{self.name} is routed (config.active_groups): rows would skip merged tokens "
                f"unless they choose their group; keep adapter {names[0]!r} attached"
            )
        return []


def adapter_layer(base_layer: nn.Module, *arguments: Any) -> TokenAdapterLayer:
    """Return the layer for adapters of a layer, with the arguments of `TokenAdapterLayer`."""
    is_routed = isinstance(base_layer, GroupRouting)
    return (RoutedAdapterLayer if is_routed else TokenAdapterLayer)(base_layer, *arguments)


def base_tokens(base: TokenLayer, dtype: torch.dtype) -> tuple[Tensor, Tensor, float | Tensor]:
    if isinstance(base, QuantizedPattention):
        return *base.dequantized(dtype), base.scale_tokens
    return base.token_set()


def value_std(base: TokenLayer) -> float:
    """The root mean square of the values of a layer: new tokens write as strongly as the old."""
    values = base.value_tokens
    if values.is_meta or isinstance(base, QuantizedPattention):
        return float(base.num_tokens**-0.5)
    return float(values.detach().float().square().mean().sqrt())


def set_tokens(layer: TokenLayer, keys: Tensor, values: Tensor) -> None:
    """Replace the tokens of a layer; they stay frozen or trainable. Of a layer that routes by
    modality, these have more or fewer new ones."""
    if isinstance(layer, ModalityPattention):
        layer.new_tokens += keys.shape[0] - layer.num_tokens
    for name, tensor in (("key_tokens", keys), ("value_tokens", values)):
        trains = getattr(layer, name).requires_grad
        setattr(layer, name, nn.Parameter(tensor.clone(), requires_grad=trains))


def stack(parts: Sequence[Tensor | None]) -> Tensor:
    """Return matrices with one width as [B, m, width], padded with zero rows; None is all zeros.
    If all are the same matrix, return it."""
    given = [part for part in parts if part is not None]
    if len(given) == len(parts) and all(part is given[0] for part in given):
        return given[0]
    most, width = max(part.shape[0] for part in given), given[0].shape[1]
    stacked = given[0].new_zeros(len(parts), most, width)
    for place, part in enumerate(parts):
        if part is not None:
            stacked[place, : part.shape[0]] = part
    return stacked
