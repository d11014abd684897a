"""A scale that moves: from where growth left it to the layer's number of tokens.

anneal = ScaleAnneal(grown, steps=150)
for step in range(1, 301):
    anneal(step)
    ...                      # train
    anneal.note()            # before saving: the scales reached go into the configuration
anneal.settle()              # and become the model's own
"""

from typing import Any

import torch

from tokenformer.growth.tokens.token_counts import Place, config_with_tokens, sizes_of
from tokenformer.growth.tokens.token_set import token_layers
from tokenformer.models.configuration import PROJECTIONS


class ScaleAnneal:
    """The scales are tensors while they move, so that compiled code does not compile again."""

    def __init__(self, model: Any, steps: int, start: dict[str, list[float]] | None = None) -> None:
        """`start`: where the scales began, of a model that was saved on the way."""
        self.model, self.steps = model, steps
        self.layers = dict(token_layers(model).values())
        self.start = start or {
            projection: [model.config.scale(projection, n) for n in range(len(model.model.layers))]
            for projection in PROJECTIONS
        }
        for place, layer in self.layers.items():
            layer.scale_tokens = torch.tensor(
                model.config.scale(*place), dtype=torch.float32, device=layer.key_tokens.device
            )
        self.step = 0

    def __call__(self, step: int) -> None:
        """Set the scales for step number `step`, counted from 1."""
        self.step = step
        for place, layer in self.layers.items():
            assert isinstance(layer.scale_tokens, torch.Tensor)
            layer.scale_tokens.fill_(self.scale(place))

    def scale(self, place: Place) -> float:
        projection, layer = place
        done = min(1.0, self.step / self.steps)
        start, end = self.start[projection][layer], self.model.config.tokens(*place)
        return start + done * (end - start)

    def note(self) -> None:
        config = self.model.config
        scales = {place: self.scale(place) for place in self.layers}
        config.scale_tokens = config_with_tokens(config, sizes_of(config), scales).scale_tokens

    def settle(self) -> None:
        self.note()
        for place, layer in self.layers.items():
            layer.scale_tokens = self.scale(place)
