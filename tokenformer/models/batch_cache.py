"""The KV caches of sequences that are decoded together, in one buffer per layer.

    batch = BatchCache(max_rows=16)
    batch.add(cache)                    # the cache of one sequence after its prompt
    batch.remove(0)                     # the last sequence takes its place

Sequences are right-aligned: all end at the same place, and `starts` says where each begins. So a
decoding step appends one token for all of them, and the padding is the left padding that the models
and the native decoder know. A sequence that joins or leaves copies only its own row, unless the
buffers must be replaced by larger or much smaller ones.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenformer.models.kv_cache import MIN_SPARE, PreallocatedTensor, preallocated_tensors


class BatchCache:
    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.cache: Any = None
        """The `DynamicCache` that the model takes; None without sequences."""
        self.starts: list[int] = []
        """Where each sequence begins."""
        self.tensors: list[PreallocatedTensor] = []
        """Keys and values of every layer, in turn: views of the first rows of `storage`."""
        self.storage: list[Tensor] = []  # each [rows, H, capacity, head_dim]

    @property
    def length(self) -> int:
        return self.tensors[0].length

    @property
    def longest(self) -> int:
        return self.length - min(self.starts)

    def add(self, cache: Any) -> None:
        """Add the preallocated cache of one sequence, which is the last row from then on."""
        new = preallocated_tensors(cache)
        if new is None:
            raise ValueError("the cache of a sequence must be preallocated and hold its prompt")
        if not self.starts:
            self.cache, self.tensors, self.starts = cache, new, [0]
            self.storage = [tensor.buffer for tensor in new]
            return
        row, length = len(self.starts), new[0].length
        if length > self.length or row == self.storage[0].shape[0]:
            rows = min(max(2 * row, row + 1), max(self.max_rows, row + 1))
            self.rebuild(rows, max(length, self.longest))
        start = self.length - length
        for buffer, tensor in zip(self.storage, new, strict=True):
            buffer[row, :, :start] = 0  # masked, but NaN would spread
            buffer[row, :, start : self.length] = tensor.filled[0]
        self.starts.append(start)
        self.narrow(self.length)

    def remove(self, row: int) -> None:
        """Remove a sequence; the last one takes its row."""
        last = self.starts.pop()
        if not self.starts:
            self.cache, self.tensors, self.storage = None, [], []
            return
        length = self.length
        if row < len(self.starts):
            self.starts[row] = last
            for buffer in self.storage:
                buffer[row, :, :length] = buffer[len(self.starts), :, :length]
        self.narrow(length)
        if min(self.starts) > length // 2:  # mostly padding
            self.rebuild(self.storage[0].shape[0], self.longest)

    def reserve(self) -> bool:
        """Make space for a token of every sequence; return whether the sequences have moved."""
        if self.length < self.storage[0].shape[2]:
            return False
        self.rebuild(self.storage[0].shape[0], self.longest)
        return True

    def rebuild(self, rows: int, length: int) -> None:
        """Move the sequences to new buffers with `rows` rows, in which they end at `length`."""
        before, lengths = self.length, [self.length - start for start in self.starts]
        capacity = length + max(MIN_SPARE, length // 4)
        for place, old in enumerate(self.storage):
            new = old.new_zeros(rows, old.shape[1], capacity, old.shape[3])
            for row, own in enumerate(lengths):
                new[row, :, length - own : length] = old[row, :, before - own : before]
            self.storage[place] = new
        self.starts = [length - own for own in lengths]
        self.narrow(length)

    def narrow(self, length: int) -> None:
        """Let the cache of the model be the first rows and tokens of the storage."""
        for tensor, buffer in zip(self.tensors, self.storage, strict=True):
            tensor.buffer, tensor.length = buffer[: len(self.starts)], length

    def mask(self) -> Tensor | None:
        """Return the mask [B, length + 1] of the next token; None without padding."""
        if not any(self.starts):
            return None
        starts = torch.tensor(self.starts, device=self.storage[0].device)
        places = torch.arange(self.length + 1, device=starts.device)
        return (places >= starts[:, None]).long()

    def positions(self) -> Sequence[int]:
        """Return the position of the next token of every sequence."""
        return [self.length - start for start in self.starts]
