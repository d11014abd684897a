"""A preallocated KV cache for `generate`.

transformers' `DynamicCache` copies the whole cache for every new token: after a thousand tokens
that costs as much as reading a quarter of the model. Only the layers of a `DynamicCache` are
replaced here, so beam search, `crop` and copies work unchanged.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

MIN_SPARE = 64
"""Minimum number of free tokens after a buffer is enlarged."""


class PreallocatedTensor:
    """A tensor [B, H, T, head_dim] stored at the start of a larger buffer."""

    def __init__(self, filled: Tensor) -> None:
        self.buffer = filled
        self.length = filled.shape[-2]

    @property
    def filled(self) -> Tensor:
        return self.buffer[..., : self.length, :]

    def reserve(self, new: int) -> Tensor:
        """Return the buffer, enlarged if `new` more tokens do not fit."""
        total = self.length + new
        # Tensors created in inference mode cannot be written to outside of it.
        frozen = self.buffer.is_inference() and not torch.is_inference_mode_enabled()
        if total <= self.buffer.shape[-2] and not frozen:
            return self.buffer
        batch, heads, _, size = self.buffer.shape
        larger = self.buffer.new_empty(batch, heads, total + max(MIN_SPARE, total // 4), size)
        larger[..., : self.length, :] = self.filled
        self.buffer = larger
        return larger

    def append(self, new: Tensor) -> Tensor:
        """Append tokens and return all of them."""
        if new.dtype != self.buffer.dtype or (new.requires_grad and torch.is_grad_enabled()):
            # Another dtype, or a tensor that autograd must not see overwritten.
            self.buffer = torch.cat([self.filled, new], dim=-2)
            self.length = self.buffer.shape[-2]
            return self.buffer
        start, stop = self.length, self.length + new.shape[-2]
        self.reserve(new.shape[-2])[..., start:stop, :] = new
        self.length = stop
        return self.filled


def buffer_property(name: str) -> Any:
    """Return a property for a tensor stored in `PreallocatedLayer.buffers`."""

    def get(layer: "PreallocatedLayer") -> Tensor | None:
        buffer = layer.buffers.get(name)
        return None if buffer is None else buffer.filled

    def put(layer: "PreallocatedLayer", filled: Tensor | None) -> None:
        if filled is None:
            layer.buffers.pop(name, None)
        else:
            layer.buffers[name] = PreallocatedTensor(filled)

    return property(get, put)


class PreallocatedLayer(DynamicLayer):
    """The keys and values of one layer in preallocated buffers."""

    keys = buffer_property("keys")
    values = buffer_property("values")

    def __init__(self, **options: Any) -> None:
        self.buffers: dict[str, PreallocatedTensor] = {}
        super().__init__(**options)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self.buffers["keys"].append(key_states), self.buffers["values"].append(value_states)

    def get_seq_length(self) -> int:
        return self.buffers["keys"].length if self.is_initialized else 0


def preallocated_tensors(cache: Any) -> list[PreallocatedTensor] | None:
    """Return the keys and values of all layers, in turn; None if a layer is not preallocated or
    still empty."""
    layers = getattr(cache, "layers", None)
    if not layers or not all(type(layer) is PreallocatedLayer for layer in layers):
        return None
    if not all(layer.is_initialized and len(layer.buffers) == 2 for layer in layers):
        return None
    return [layer.buffers[name] for layer in layers for name in ("keys", "values")]


def preallocate(cache: Any) -> Any:
    """Give an empty `DynamicCache` preallocated layers. Other caches are returned unchanged."""
    plain = type(cache) is DynamicCache and not cache.offloading and cache.get_seq_length() == 0
    if plain and all(type(layer) is DynamicLayer for layer in cache.layers):
        cache.layers = [PreallocatedLayer() for _ in cache.layers]
    return cache
