import numpy as np
import torch

from tokenformer.data.batches import fixed_batches, sample_batch

TOKENS = np.arange(1000, dtype=np.uint16)


def test_a_batch_depends_only_on_seed_and_sample_indices():
    def batch(seed: int, first: int, count: int = 8) -> torch.Tensor:
        return sample_batch(TOKENS, length=16, seed=seed, first_sample=first, count=count)

    assert torch.equal(batch(0, 40), batch(0, 40))
    assert not torch.equal(batch(0, 40), batch(0, 48))
    assert not torch.equal(batch(0, 40), batch(1, 40))
    # The micro-batches of two ranks, two each, make up the global batch.
    slices = [batch(0, first, 2) for first in (40, 42, 44, 46)]
    assert torch.equal(torch.cat(slices), batch(0, 40))


def test_segments_are_consecutive_and_reach_both_ends():
    batch = sample_batch(TOKENS, length=16, seed=0, first_sample=0, count=8000)
    assert batch.shape == (8000, 17)
    assert batch.dtype == torch.int64
    assert (batch.diff(dim=1) == 1).all()
    assert batch.min() == 0
    assert batch.max() == 999


def test_an_epoch_contains_every_target_once():
    batch = sample_batch(TOKENS, length=9, seed=0, first_sample=0, count=111, mode="epochs")
    assert sorted(batch[:, 1:].flatten().tolist()) == list(range(1, 1000))


def test_validation_segments_are_fixed_and_spread_evenly():
    batches = fixed_batches(TOKENS, batch_size=4, length=9, count=3)
    assert [tuple(batch.shape) for batch in batches] == [(4, 10)] * 3
    assert batches[0][0, 0] == 0
    assert batches[-1][-1, -1] == 999
