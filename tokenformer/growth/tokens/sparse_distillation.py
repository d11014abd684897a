"""Comparing a sparse model with the dense one it came from, and training it to match."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from tokenformer.growth.model_inputs import run_model
from tokenformer.growth.tokens.token_usage import eval_mode

CLIP_NORM = 1.0
WARMUP_SHARE = 0.05


def mean_losses(model: PreTrainedModel, batches: Sequence[Tensor]) -> float | None:
    """Return the mean next-token loss over batches of token ids, in nats; None for images."""
    if model.main_input_name == "pixel_values":
        return None
    total = count = 0.0
    for batch, logits in predictions(model, batches):
        targets = batch[:, 1:].to(logits.device)
        total += F.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), targets.flatten(), reduction="sum"
        ).item()
        count += targets.numel()
    return total / max(1.0, count)


def divergence(model: PreTrainedModel, source: PreTrainedModel, batches: Sequence[Tensor]) -> float:
    """Return the mean KL divergence of the predictions of `model` from those of `source`."""
    total = count = 0.0
    pairs = zip(predictions(model, batches), predictions(source, batches), strict=True)
    for (_, ours), (_, theirs) in pairs:
        total += kl_divergence(ours, theirs).sum().item()
        count += ours.shape[:-1].numel()
    return total / max(1.0, count)


@torch.no_grad()
def predictions(model: Any, batches: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    for batch in batches:
        with eval_mode(model):
            logits = run_model(model, batch.to(model.device)).logits
        yield batch, logits


def kl_divergence(logits: Tensor, target: Tensor) -> Tensor:
    """Return the divergence from the target by position."""
    ours, theirs = (one.float().log_softmax(-1) for one in (logits, target))
    return F.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1)


def train_to_match(
    model: Any,
    source: Any,
    batches: Sequence[Tensor],
    steps: int,
    learning_rate: float,
) -> Iterator[int]:
    """Train `model` in place to match the logits of `source`, one batch per step; yield the number
    of every step. The rate warms up and then falls linearly to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    warmup = max(1, round(WARMUP_SHARE * steps))
    was_training = model.training
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            rising, falling = (step + 1) / warmup, (steps - step) / max(1, steps - warmup)
            group["lr"] = learning_rate * min(1.0, rising, falling)
        batch = batches[step % len(batches)].to(model.device)
        with torch.no_grad(), eval_mode(source):
            target = run_model(source, batch).logits
        kl_divergence(run_model(model, batch).logits, target).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        yield step + 1
    model.train(was_training)
