"""How much growth changes the output of a layer, or of a whole model, on random input."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from tokenformer.growth.model_inputs import random_batch, random_image_text, run_model
from tokenformer.layers.pattention import Pattention
from tokenformer.ops.pattention import pattention

ROWS = 4
"""Few, so that measuring a layer takes little longer than reading it."""

Tokens = tuple[Tensor, Tensor, float]
"""Keys, values and scale."""


@torch.no_grad()
def layer_change(layer: Pattention, before: Tokens, after: Tokens, seed: int) -> float:
    """Return the largest change of a layer's output on random rows, relative to the largest
    output."""
    keys = before[0]
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(ROWS, keys.shape[1], generator=generator).to(keys)
    options: Any = {"theta": layer.theta, "approximate": layer.approximate, "eps": layer.eps}
    old_output, new_output = (
        pattention(rows, k, v, scale_tokens=scale, backend="reference", **options)
        for k, v, scale in (before, after)
    )
    return relative_change(old_output, new_output)


@torch.no_grad()
def output_change(before: PreTrainedModel, after: PreTrainedModel, seed: int) -> float:
    """Return the largest change of a logit on random tokens or images, relative to the largest
    logit. Of a vision-language model, the larger one of text alone and of text after images."""
    batches: list[Any] = [random_batch(before, seed)]
    if "image" in before.input_modalities and "text" in before.input_modalities:
        batches.append(random_image_text(before, seed))
    return max(
        relative_change(*(text_logits(model, batch) for model in (before, after)))
        for batch in batches
        if batch is not None
    )


def text_logits(model: PreTrainedModel, batch: Any) -> Tensor:
    """Return the logits of a batch, without those at the positions of images, which predict
    nothing."""
    found = logits(model, batch)
    if isinstance(batch, Mapping):
        return found[batch["input_ids"] != model.config.image_token_id]
    return found


def logits(model: PreTrainedModel, batch: Any) -> Tensor:
    was_training = model.training
    result: Tensor = run_model(model.eval(), batch).logits
    model.train(was_training)
    return result


def relative_change(before: Tensor, after: Tensor) -> float:
    largest = before.abs().max()
    change = (after - before).abs().max()
    return (change / largest if largest > 0 else change).item()
