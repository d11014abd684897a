"""The weights of a token all around its top contexts, for highlighting.

An index keeps the strongest position of each context. Running the model once more over the samples
that it kept gives the weights at the positions around, or on all patches of an image.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from tokenformer.growth.tokens.token_usage import observe_inputs
from tokenformer.interpret.firing import sample_chunks
from tokenformer.interpret.token_index import AFTER, BEFORE, TokenIndex
from tokenformer.interpret.token_name import full_names, named_layers
from tokenformer.layers.pattention import Pattention

BATCH_SIZE = 8


class ContextWeights:
    """Collects the weights of one layer around its top contexts."""

    def __init__(self, layer: Pattention, index: TokenIndex, name: str) -> None:
        self.layer, found = layer, index.layers[name]
        self.samples, self.positions = found.top_samples, found.top_positions  # [n, K]
        self.is_text = index.summary.grid is None
        width = BEFORE + 1 + AFTER if self.is_text else 0
        self.weights = torch.zeros(*self.samples.shape, width, dtype=torch.float16)

    def add(self, x: Tensor, numbers: list[int]) -> None:
        """Add inputs [B, T, d] of the samples with these numbers."""
        if not self.is_text and not self.weights.shape[2]:
            self.weights = torch.zeros(*self.samples.shape, x.shape[1], dtype=torch.float16)
        for row, number in enumerate(numbers):
            tokens, ranks = (self.samples == number).nonzero(as_tuple=True)  # [m]
            if not len(tokens):
                continue
            used, columns = tokens.unique(return_inverse=True)
            parts = [
                self.layer.token_weights(rows[0]).weights[:, used]
                for _, chunks in sample_chunks(x[row : row + 1], self.layer.num_tokens)
                for _, rows in chunks
            ]
            weights = torch.cat(parts).cpu()  # [T, used]
            window = torch.arange(self.weights.shape[2])[None]  # [1, W]
            if self.is_text:
                window = window + self.positions[tokens, ranks][:, None] - BEFORE  # [m, W]
            inside = (window >= 0) & (window < len(weights))
            at = window.clamp(0, len(weights) - 1).expand(len(tokens), -1)
            found = weights[at, columns[:, None]] * inside
            self.weights[tokens, ranks] = found.to(torch.float16)


@torch.no_grad()
def context_weights(
    model: PreTrainedModel,
    index: TokenIndex,
    inputs: Callable[[list[int]], Tensor],
    on_samples: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Tensor]:
    """Return by layer the weights around every top context: [n, K, W] of a text, from `BEFORE`
    positions before it to `AFTER` after it; [n, K, T] of images.

    Args:
        model: the model of the index.
        index: an index of it.
        inputs: returns the model's inputs of samples by their numbers in the stream.
        on_samples: called with the number of samples done and of all.
    """
    names, layers = full_names(model), named_layers(model)
    found = {name: ContextWeights(layer, index, name) for name, layer in layers.items()}
    numbers = index.sample_numbers.tolist()
    for start in range(0, len(numbers), BATCH_SIZE):
        batch = numbers[start : start + BATCH_SIZE]
        observers = {
            names[name]: lambda x, each=each, batch=batch: each.add(x, batch)
            for name, each in found.items()
        }
        observe_inputs(model, [inputs(batch)], observers)
        on_samples(start + len(batch), len(numbers))
    return {name: each.weights for name, each in found.items()}
