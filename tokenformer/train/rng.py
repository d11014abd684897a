"""The random number generators' states as tensors, to store in a checkpoint.

`restore(states())` covers the global generators of torch, on the CPU and the current accelerator,
of numpy and of Python.
"""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def states() -> dict[str, Tensor]:
    numpy: Any = np.random.get_state(legacy=True)
    _, keys, position, has_normal, normal = numpy
    version, words, spare = random.getstate()
    found = {
        "cpu": torch.get_rng_state(),
        "numpy": torch.from_numpy(keys.astype(np.int64)),
        "numpy_position": torch.tensor([position, has_normal]),
        "numpy_normal": torch.tensor([normal], dtype=torch.float64),
        "python": torch.tensor([version, *words]),
        "python_normal": torch.tensor([spare is not None, spare or 0.0], dtype=torch.float64),
    }
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type  # type: ignore[union-attr]
        found[kind] = torch.get_device_module(kind).get_rng_state()
    return found


def restore(states: dict[str, Tensor]) -> None:
    """Set the generators; the state of an accelerator that is not available is ignored."""
    torch.set_rng_state(states["cpu"].clone())  # a view into a larger tensor would crash torch
    position, has_normal = states["numpy_position"].tolist()
    keys = states["numpy"].numpy().astype(np.uint32)
    normal = states["numpy_normal"].item()
    np.random.set_state(("MT19937", keys, position, has_normal, normal))
    version, *words = states["python"].tolist()
    has_spare, spare = states["python_normal"].tolist()
    random.setstate((version, tuple(words), spare if has_spare else None))
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type  # type: ignore[union-attr]
        if kind in states:
            torch.get_device_module(kind).set_rng_state(states[kind].clone())
