"""The trainable part of a model whose other weights are frozen."""

from collections.abc import Iterator
from typing import Any

from torch import nn


class TrainedPart(nn.Module):
    """A view of the parameters of a model that train when it is created, under their names in it.

    The optimizer, the EMA and checkpoints see only these. Parameters are looked up in the model at
    every call, because sharding replaces them.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = [model]  # in a list, so not a submodule
        self.names = {name for name, p in model.named_parameters() if p.requires_grad}

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.model[0].named_parameters():
            if name in self.names:
                yield name, parameter

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        yield from self.model[0].named_modules()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the parameters themselves, not copies."""
        return dict(self.named_parameters())
