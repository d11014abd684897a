"""Move the scale of every layer linearly from its value after growth to its number of tokens.

anneal = ScaleAnneal(grown, steps=150)
for step in range(1, 301):
    anneal(step)
    ...                      # train
    anneal.update_config()   # before saving
anneal.finish()              # the scales become plain numbers again
"""

from typing import TYPE_CHECKING

import torch

from tokenformer.growth.tokens.token_counts import LayerProjection, config_with_tokens, token_counts
from tokenformer.growth.tokens.token_set import token_layers
from tokenformer.models.configuration import PROJECTIONS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ScaleAnneal:
    """While they move, the scales are tensors, so that compiled code is not recompiled."""

    def __init__(self, model: "PreTrainedModel", steps: int) -> None:
        self.model, self.steps = model, steps
        self.layers = dict(token_layers(model).values())
        self.start: dict[str, list[float]] = {
            projection: [model.config.scale(projection, n) for n in range(len(model.model.layers))]
            for projection in PROJECTIONS
        }
        """Scales at step 0 by projection and layer; a resumed run sets those it saved."""
        for place, layer in self.layers.items():
            layer.scale_tokens = torch.tensor(
                model.config.scale(*place), dtype=torch.float32, device=layer.key_tokens.device
            )
        self.step = 0

    def __call__(self, step: int) -> None:
        """Set the scales for `step`, counted from 1."""
        self.step = step
        for place, layer in self.layers.items():
            assert isinstance(layer.scale_tokens, torch.Tensor)
            layer.scale_tokens.fill_(self.scale(place))

    def scale(self, place: LayerProjection) -> float:
        projection, layer = place
        done = min(1.0, self.step / self.steps)
        start, end = self.start[projection][layer], self.model.config.tokens(*place)
        return start + done * (end - start)

    def update_config(self) -> None:
        """Write the current scales to the model's configuration."""
        config = self.model.config
        scales = {place: self.scale(place) for place in self.layers}
        config.scale_tokens = config_with_tokens(config, token_counts(config), scales).scale_tokens

    def finish(self) -> None:
        self.update_config()
        for place, layer in self.layers.items():
            layer.scale_tokens = self.scale(place)
