import random

import numpy as np
import torch

from tokenformer.train import rng


def sample():
    return [torch.rand(3).tolist(), np.random.rand(3).tolist(), random.gauss(0, 1)]


def test_the_generators_go_on_from_where_they_were():
    random.gauss(0, 1)  # leaves a spare one
    states = rng.states()
    expected = sample()
    sample()
    rng.restore(states)
    assert sample() == expected


def test_states_of_many_ranks_in_one_tensor():
    """A row of a stack is a view; torch reads past a view's own memory."""
    first, second = rng.states(), None
    torch.rand(7)
    second = rng.states()
    expected = sample()
    rows = {name: torch.stack([first[name], second[name]]) for name in first}
    rng.restore({name: stacked[1] for name, stacked in rows.items()})
    assert sample() == expected
