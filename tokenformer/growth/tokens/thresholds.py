"""Thresholds from data: the training-free way to make a dense model sparse.

A token is skipped in the rows to whose output it would add less than the threshold of its layer,
|w_i| |v_i|. The threshold is the quantile that leaves the wanted share of all tokens on data, as
TEAL does for activations (arXiv 2408.14690). No routing, no groups, no training: the baseline.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from tokenformer.growth.model_from_tensors import ModelT, build_model
from tokenformer.growth.sparsity_report import SparseLayer
from tokenformer.growth.tokens.token_counts import LayerProjection
from tokenformer.growth.tokens.token_usage import row_chunks, scores_and_weights
from tokenformer.layers.pattention import Pattention

PLACES = 1 << 24
"""`torch.quantile` takes at most this many numbers."""


@torch.no_grad()
def layer_threshold(
    name: str, layer: Pattention, fit: Tensor, test: Tensor, active: float
) -> tuple[float, SparseLayer]:
    """Return the threshold for rows `fit` [R, d_in], and what it does to rows `test`."""
    lengths = layer.value_tokens.norm(dim=1)
    rows = fit[: max(1, PLACES // layer.num_tokens)]
    added = [weights_of(layer, some).abs() * lengths for some in row_chunks(layer, rows)]
    everything = torch.cat(added).flatten().float()
    threshold = torch.quantile(everything, 1 - active).item() if active < 1 else 0.0
    lost = whole = kept = 0.0
    for some in row_chunks(layer, test):
        weights = weights_of(layer, some)
        skipped = weights.abs() * lengths < threshold
        values = layer.value_tokens.to(weights)
        lost += ((weights * skipped) @ values).square().sum().item()
        whole += (weights @ values).square().sum().item()
        kept += (~skipped).sum().item()
    error = (lost / whole) ** 0.5 if whole > 0 else 0.0
    count = round(kept / max(1, len(test)))
    return threshold, SparseLayer(name, layer.num_tokens, layer.num_tokens, count, error, error)


def weights_of(layer: Pattention, rows: Tensor) -> Tensor:
    return scores_and_weights(layer, rows, layer.key_tokens, layer.scale_tokens)[1]


@torch.no_grad()
def build_with_thresholds(
    model: ModelT, places: Mapping[str, LayerProjection], found: Mapping[str, float]
) -> ModelT:
    """Return a copy of the model with the thresholds by layer name."""
    thresholds: dict[str, list[float | None]] = {}
    for name, (projection, number) in places.items():
        by_layer = thresholds.setdefault(projection, [None] * model.config.num_hidden_layers)
        by_layer[number] = found[name]
    config = type(model.config).from_dict({**model.config.to_dict(), "thresholds": thresholds})
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return build_model(type(model), config, tensors).train(model.training)
