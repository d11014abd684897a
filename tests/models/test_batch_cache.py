"""The caches of a batch hold what each sequence was given, through any order of changes."""

import random
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache

from tokenformer.models.batch_cache import BatchCache
from tokenformer.models.kv_cache import PreallocatedLayer

LAYERS, HEADS, SIZE = 2, 3, 4


def filled_cache(length: int, generator: torch.Generator) -> tuple[Any, list[torch.Tensor]]:
    """Return the cache of one sequence and what is in it, [H, T, head_dim] each."""
    cache = DynamicCache()
    cache.layers = [PreallocatedLayer() for _ in range(LAYERS)]
    parts = [torch.randn(1, HEADS, length, SIZE, generator=generator) for _ in range(2 * LAYERS)]
    for layer in range(LAYERS):
        cache.update(parts[2 * layer], parts[2 * layer + 1], layer)
    return cache, [part[0] for part in parts]


def check(batch: BatchCache, rows: list[list[torch.Tensor]]) -> None:
    assert batch.positions() == [row[0].shape[1] for row in rows]
    for row, (start, parts) in enumerate(zip(batch.starts, rows, strict=True)):
        for tensor, part in zip(batch.tensors, parts, strict=True):
            assert tensor.filled.shape[0] == len(rows)
            assert torch.equal(tensor.filled[row, :, start:], part)
            assert not tensor.filled[row, :, :start].isnan().any()
    mask = batch.mask()
    assert (mask is None) == (not any(batch.starts))
    if mask is not None:
        assert mask.shape == (len(rows), batch.length + 1)
        assert mask.sum(1).tolist() == [row[0].shape[1] + 1 for row in rows]


@pytest.mark.parametrize("seed", range(4))
def test_sequences_that_join_grow_and_leave(seed):
    numbers, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, rows = BatchCache(max_rows=5), []
    for _ in range(120):
        if rows and numbers.random() < 0.3:
            row = numbers.randrange(len(rows))
            batch.remove(row)
            rows[row] = rows[-1]
            rows.pop()
        elif len(rows) < 5:
            cache, parts = filled_cache(numbers.choice([1, 3, 20, 150]), generator)
            batch.add(cache)
            rows.append(parts)
        for _ in range(numbers.choice([0, 1, 30]) if rows else 0):
            batch.reserve()
            for layer in range(LAYERS):
                new = [torch.randn(len(rows), HEADS, 1, SIZE, generator=generator) for _ in "kv"]
                batch.cache.update(*new, layer)
                for kind, part in enumerate(new):
                    for row, parts in enumerate(rows):
                        own = 2 * layer + kind
                        parts[own] = torch.cat([parts[own], part[row]], dim=1)
        if rows:
            check(batch, rows)
            assert batch.storage[0].shape[0] <= 5


def test_padding_does_not_outlive_the_longest_sequence():
    generator = torch.Generator().manual_seed(0)
    batch = BatchCache(max_rows=2)
    for length in (900, 10):
        batch.add(filled_cache(length, generator)[0])
    batch.remove(0)
    assert batch.length == 10
    batch.remove(0)
    assert batch.storage == []
