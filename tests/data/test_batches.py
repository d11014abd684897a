import numpy as np
import pytest
import torch

from tokenformer.data.batches import fixed_batches, random_batch

TOKENS = np.arange(1000, dtype=np.uint16)


def test_a_batch_is_a_function_of_seed_and_step_alone():
    def batch(seed: int, step: int) -> torch.Tensor:
        return random_batch(TOKENS, batch_size=8, length=16, seed=seed, step=step)

    assert torch.equal(batch(0, 5), batch(0, 5))
    assert not torch.equal(batch(0, 5), batch(0, 6))
    assert not torch.equal(batch(0, 5), batch(1, 5))


def test_segments_are_consecutive_and_reach_both_ends():
    batch = random_batch(TOKENS, batch_size=4000, length=16, seed=0, step=0)
    assert batch.shape == (4000, 17)
    assert (batch.diff(dim=1) == 1).all()
    assert batch.min() == 0
    assert batch.max() == 999


def test_validation_segments_are_fixed_and_spread_evenly():
    batches = fixed_batches(TOKENS, batch_size=4, length=16, count=3)
    assert [tuple(batch.shape) for batch in batches] == [(4, 17)] * 3
    assert batches[0][0, 0] == 0
    assert batches[-1][-1, -1] == 999


def test_the_shortest_corpus_that_serves_and_the_longest_that_does_not():
    assert random_batch(TOKENS[:17], batch_size=1, length=16, seed=0, step=0).shape == (1, 17)
    with pytest.raises(ValueError, match="16 tokens, too few for segments of length=16"):
        random_batch(TOKENS[:16], batch_size=1, length=16, seed=0, step=0)
