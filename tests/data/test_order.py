"""Sample order: deterministic, complete, and independent of batch sizes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenformer.data.order import MODES, permute, round_keys, segment_starts, validation_starts
from tokenformer.errors import DataError


def starts(total: int, length: int, first: int, count: int, mode: str, seed: int = 0) -> list[int]:
    found = segment_starts(total, length, seed=seed, first_sample=first, count=count, mode=mode)
    assert found.dtype == np.int64
    return found.tolist()


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=50, deadline=None)
@given(
    total=st.integers(9, 5000),
    cuts=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    first=st.integers(0, 3000),
    seed=st.integers(0, 2**63 - 1),
)
def test_samples_depend_only_on_their_index(mode, total, cuts, first, seed):
    """Consecutive batches of any sizes equal one large batch."""
    whole = starts(total, 8, first, sum(cuts), mode, seed)
    pieces: list[int] = []
    for count in cuts:
        pieces += starts(total, 8, first + len(pieces), count, mode, seed)
    assert pieces == whole


@settings(max_examples=100, deadline=None)
@given(windows=st.integers(1, 700), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 10**9))
def test_an_epoch_uses_every_window_once(windows, seed, epoch):
    length = 4
    total = windows * length + 1  # the shortest corpus with that many windows
    used = starts(total, length, epoch * windows, windows, "epochs", seed)
    assert sorted(used) == list(range(0, windows * length, length))


def test_epochs_differ_from_each_other_and_by_seed():
    first, second, other = (
        starts(10_001, 10, at, 1000, "epochs", seed) for at, seed in ((0, 0), (1000, 0), (0, 1))
    )
    assert first != sorted(first)
    assert first != second
    assert first != other


def test_epoch_order_looks_random():
    """Neighbors in the order are far apart, and window 0 is equally likely at every index."""
    order = np.array(starts(4 * 4096 + 1, 4, 0, 4096, "epochs")) // 4
    steps = np.abs(np.diff(order))
    assert abs(steps.mean() / 4096 - 1 / 3) < 0.02  # uniform pairs: a third of the range
    assert abs(np.corrcoef(order, np.arange(4096))[0, 1]) < 0.05
    size = 7
    where = [
        int(permute(np.zeros(1, dtype=np.uint64), size, round_keys(seed, 0))[0])
        for seed in range(7000)
    ]
    counts = np.bincount(where, minlength=size)
    assert ((counts - 1000) ** 2 / 1000).sum() < 25  # chi-squared, six degrees: p < 0.001


def test_random_segments_are_uniform_and_reach_both_ends():
    found = np.array(starts(116, 16, 0, 100_000, "random"))  # 100 possible starts
    counts = np.bincount(found, minlength=100)
    assert len(counts) == 100
    assert ((counts - 1000) ** 2 / 1000).sum() < 160  # chi-squared, 99 degrees: p < 0.001


def test_known_values_do_not_change_across_versions():
    """A run resumed with another version of numpy or of this package reads the same text."""
    assert starts(10**12, 1024, 10**9, 2, "random", 7) == KNOWN_RANDOM
    assert starts(10**12, 1024, 10**9, 2, "epochs", 7) == KNOWN_EPOCHS


KNOWN_RANDOM = [121_562_163_868, 264_886_572_156]
KNOWN_EPOCHS = [470_960_059_392, 858_498_657_280]


def test_memory_does_not_depend_on_the_length_of_the_corpus():
    import tracemalloc

    tracemalloc.start()
    starts(10**15, 8, 10**13, 1000, "epochs")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


@settings(max_examples=100, deadline=None)
@given(total=st.integers(9, 5000), count=st.integers(1, 300))
def test_validation_windows_are_spread_evenly_and_disjoint(total, count):
    found = validation_starts(total, 8, count=count)
    windows = (total - 1) // 8
    assert len(found) == min(count, windows)
    assert (np.diff(found) >= 8).all()
    assert found[0] == 0
    if len(found) > 1:
        assert found[-1] == (windows - 1) * 8
    assert validation_starts(total, 8).tolist() == list(range(0, windows * 8, 8))


def test_the_shortest_valid_corpus():
    for mode in MODES:
        assert starts(17, 16, 5, 3, mode) == [0, 0, 0]
        with pytest.raises(DataError, match="16 tokens; one sequence of length 16 needs 17"):
            starts(16, 16, 0, 1, mode)
    with pytest.raises(ValueError, match="mode='shuffle' is not known; choose from random, epochs"):
        starts(17, 16, 0, 1, "shuffle")
    with pytest.raises(ValueError, match="length=0"):
        starts(17, 0, 0, 1, "random")
