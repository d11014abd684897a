"""A cache of keys and values with room behind its end, for `generate`.

transformers' own copies all it holds for every new token; after a thousand tokens that costs as
much as a quarter of the model. It stays a `DynamicCache`, so beams, crops and copies work as ever.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

LEAST_ROOM = 64
"""Tokens to come for which there is room when a roll is made longer."""


class Roll:
    """A tensor [B, H, T, head_dim] in memory that is longer than it."""

    def __init__(self, held: Tensor) -> None:
        self.room = held
        self.length = held.shape[-2]

    @property
    def held(self) -> Tensor:
        return self.room[..., : self.length, :]

    def make_room(self, new: int) -> Tensor:
        """The memory, with room for so many more tokens."""
        total = self.length + new
        # What was made in inference mode cannot be written to outside of it.
        frozen = self.room.is_inference() and not torch.is_inference_mode_enabled()
        if total <= self.room.shape[-2] and not frozen:
            return self.room
        batch, heads, _, size = self.room.shape
        larger = self.room.new_empty(batch, heads, total + max(LEAST_ROOM, total // 4), size)
        larger[..., : self.length, :] = self.held
        self.room = larger
        return larger

    def append(self, new: Tensor) -> Tensor:
        if new.dtype != self.room.dtype or (new.requires_grad and torch.is_grad_enabled()):
            self.room = torch.cat([self.held, new], dim=-2)  # another type, or a graph of its own
            self.length = self.room.shape[-2]
            return self.room
        start, stop = self.length, self.length + new.shape[-2]
        self.make_room(new.shape[-2])[..., start:stop, :] = new
        self.length = stop
        return self.held


def roll_of(name: str) -> Any:
    """A property that is a tensor to those who read or set it, and a roll to `RoomyLayer`."""

    def get(layer: "RoomyLayer") -> Tensor | None:
        roll = layer.rolls.get(name)
        return None if roll is None else roll.held

    def put(layer: "RoomyLayer", held: Tensor | None) -> None:
        if held is None:
            layer.rolls.pop(name, None)
        else:
            layer.rolls[name] = Roll(held)

    return property(get, put)


class RoomyLayer(DynamicLayer):
    keys = roll_of("keys")
    values = roll_of("values")

    def __init__(self, **options: Any) -> None:
        self.rolls: dict[str, Roll] = {}
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
        return self.rolls["keys"].append(key_states), self.rolls["values"].append(value_states)

    def get_seq_length(self) -> int:
        return self.rolls["keys"].length if self.is_initialized else 0


def with_room(cache: Any) -> Any:
    """The same empty cache, of such layers where it is a plain one."""
    plain = type(cache) is DynamicCache and not cache.offloading and cache.get_seq_length() == 0
    if plain and all(type(layer) is DynamicLayer for layer in cache.layers):
        cache.layers = [RoomyLayer() for _ in cache.layers]
    return cache
