"""A scale that moves: from where growth left it to the layer's number of tokens.

anneal = ScaleAnneal(grown, steps=150)
for step in range(1, 301):
    anneal(step)
    ...                      # train
anneal.settle()              # the scales reached become the model's own
"""

from typing import Any

import torch

from tokenformer.growth.plan import Place, grown_config, sizes_of
from tokenformer.growth.tokens import layers_of


class ScaleAnneal:
    """The scales are tensors while they move, so that compiled code does not compile again."""

    def __init__(self, model: Any, steps: int) -> None:
        self.model, self.steps = model, steps
        self.layers = dict(layers_of(model).values())
        self.start = {place: model.config.scale(*place) for place in self.layers}
        for layer in self.layers.values():
            layer.scale_tokens = torch.tensor(
                layer.scale_tokens, dtype=torch.float32, device=layer.key_tokens.device
            )
        self.step = 0

    def __call__(self, step: int) -> None:
        """Set the scales for step number `step`, counted from 1."""
        self.step = step
        for place, layer in self.layers.items():
            assert isinstance(layer.scale_tokens, torch.Tensor)
            layer.scale_tokens.fill_(self.scale(place))

    def scale(self, place: Place) -> float:
        done = min(1.0, self.step / self.steps)
        end = self.model.config.tokens(*place)
        return self.start[place] + done * (end - self.start[place])

    def settle(self) -> None:
        config = self.model.config
        scales = {place: self.scale(place) for place in self.layers}
        settled = grown_config(config, sizes_of(config), scales)
        config.scale_tokens = settled.scale_tokens
        for place, layer in self.layers.items():
            layer.scale_tokens = scales[place]
