"""An exponential moving average (EMA) of the weights. The average is validated and exported.

At step t the decay is at most (1 + t) / (10 + t), so that the average does not hold on to the
random weights of the first steps.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tokenformer.train.parallel.mesh import group_by_mesh


class WeightEMA:
    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = dict(model.named_parameters())
        self.tensors: dict[str, Tensor] = {
            name: parameter.detach().clone() for name, parameter in self.parameters.items()
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after optimizer step `step`, counted from 1."""
        decay = min(self.decay, (1 + step) / (10 + step))
        averages = group_by_mesh(self.tensors.values())
        weights = group_by_mesh(self.parameters.values())
        for old, new in zip(averages, weights, strict=True):
            torch._foreach_lerp_(old, [*new], 1.0 - decay)

    @torch.no_grad()
    def reset(self) -> None:
        """Restart the average at the current weights."""
        for name, parameter in self.parameters.items():
            self.tensors[name].copy_(parameter)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages, named as in a checkpoint."""
        return {f"ema.{name}": tensor for name, tensor in self.tensors.items()}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Swap the averages into the model within the block."""
        weights = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self.copy_to_model(self.tensors)
        try:
            yield
        finally:
            self.copy_to_model(weights)

    @torch.no_grad()
    def copy_to_model(self, tensors: dict[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(tensors[name])
