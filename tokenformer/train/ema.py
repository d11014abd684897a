"""A moving average of the weights (EMA): where there is one, it is validated and exported.

Early on the average forgets faster, so that it does not drag the fresh weights along: at step t its
decay is at most (1 + t) / (10 + t).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tokenformer.train.parallel.mesh import by_mesh


class WeightEMA:
    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = dict(model.named_parameters())
        self.tensors: dict[str, Tensor] = {
            name: parameter.detach().clone() for name, parameter in self.parameters.items()
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after optimizer step number `step`, counted from 1."""
        decay = min(self.decay, (1 + step) / (10 + step))
        averages, weights = by_mesh(self.tensors.values()), by_mesh(self.parameters.values())
        for some, fresh in zip(averages, weights, strict=True):
            torch._foreach_lerp_(some, [*fresh], 1.0 - decay)

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again at the weights of now."""
        for name, parameter in self.parameters.items():
            self.tensors[name].copy_(parameter)

    def stored(self) -> dict[str, Tensor]:
        """By the names that a checkpoint keeps them under."""
        return {f"ema.{name}": tensor for name, tensor in self.tensors.items()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model with the average as its weights, for the length of a block."""
        aside = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self.fill(self.tensors)
        try:
            yield
        finally:
            self.fill(aside)

    @torch.no_grad()
    def fill(self, tensors: dict[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(tensors[name])
