"""How far growth has moved a layer, or a whole model, on random input."""

from typing import Any

import torch
from torch import Tensor

from tokenformer.growth.probe_inputs import random_batch, run
from tokenformer.layers.pattention import Pattention
from tokenformer.ops.pattention import pattention

ROWS = 32

Tokens = tuple[Tensor, Tensor, float]
"""Keys, values and scale."""


@torch.no_grad()
def layer_change(layer: Pattention, before: Tokens, after: Tokens, seed: int) -> float:
    """Largest change of a layer's output over random rows, as a share of the largest output."""
    keys = before[0]
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(ROWS, keys.shape[1], generator=generator).to(keys)
    options: Any = {"theta": layer.theta, "approximate": layer.approximate, "eps": layer.eps}
    was, became = (
        pattention(rows, k, v, scale_tokens=scale, **options) for k, v, scale in (before, after)
    )
    return relative_change(was, became)


@torch.no_grad()
def output_change(before: Any, after: Any, seed: int) -> float:
    """Largest change of a logit over random tokens or images, as a share of the largest logit."""
    batch = random_batch(before, seed)
    return relative_change(*(logits(model, batch) for model in (before, after)))


def logits(model: Any, batch: Tensor) -> Tensor:
    was_training = model.training
    found: Tensor = run(model.eval(), batch).logits
    model.train(was_training)
    return found


def relative_change(before: Tensor, after: Tensor) -> float:
    largest = before.abs().max()
    change = (after - before).abs().max()
    return (change / largest if largest > 0 else change).item()
