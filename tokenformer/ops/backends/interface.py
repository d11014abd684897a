"""The interface of a backend.

Every backend is a function `(x, keys, values, options) -> out`. Most are a `Kernel`: a forward and
a hand-written backward pass over rows `[R, d]`, which `autograd.py` turns into such a function.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from tokenformer.ops.theta import ThetaOptions

Saved = tuple[Tensor, ...]
"""What the backward pass needs besides the inputs."""
Gradients = tuple[Tensor, Tensor, Tensor, Tensor]
"""The gradients of rows, keys, values and scale."""


class SavedTensor(NamedTuple):
    """Shape and dtype of a tensor that a kernel saves for its backward pass."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Sizes(NamedTuple):
    """The shapes of one call: rows [R, d_in], keys [n, d_in], values [n, d_out]."""

    rows: int
    d_in: int
    tokens: int
    d_out: int


class Kernel(ABC):
    """Pattention with one theta, forward and backward."""

    def __init__(self, options: ThetaOptions) -> None:
        self.options = options

    @abstractmethod
    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, *, save: bool = True
    ) -> tuple[Tensor, Saved]:
        """[R, d_in] -> [R, d_out]. With `save=False` no backward pass follows."""

    @abstractmethod
    def backward(
        self, grad: Tensor, x: Tensor, keys: Tensor, values: Tensor, saved: Saved
    ) -> Gradients: ...

    @abstractmethod
    def saved_tensors(self, sizes: Sizes, dtype: torch.dtype) -> list[SavedTensor]:
        """What `forward` saves for inputs of these sizes and dtype, in order."""


def is_trained(*inputs: float | Tensor) -> bool:
    """Whether a backward pass may follow."""
    learned = (isinstance(tensor, Tensor) and tensor.requires_grad for tensor in inputs)
    return torch.is_grad_enabled() and any(learned)
