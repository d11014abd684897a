"""The training loop: batches in, a trained model and a row of metrics per step out."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tokenformer.data.batches import fixed_batches, sample_batch
from tokenformer.data.token_ids import TokenSequence
from tokenformer.models.accounting import training_flops
from tokenformer.train.metrics import Row
from tokenformer.train.options import TrainOptions


def train(
    model: Any,
    tokens: TokenSequence,
    validation: TokenSequence,
    options: TrainOptions,
    on_step: Callable[[Row], None],
) -> list[Row]:
    """Train a causal language model in place. `on_step` sees every row as it is made."""
    optimizer = make_optimizer(model, options)
    held_out = fixed_batches(
        validation,
        batch_size=options.batch_size,
        length=options.length,
        count=options.validation_batches,
    )
    flops = options.batch_size * sum(training_flops(model.config, options.length).values())
    rows: list[Row] = []
    start = time.perf_counter()
    model.train()
    for step in range(1, options.steps + 1):
        batch = sample_batch(
            tokens,
            length=options.length,
            seed=options.seed,
            first_sample=(step - 1) * options.batch_size,
            count=options.batch_size,
        )
        rate = learning_rate(step, options)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = next_token_loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        row: Row = {
            "step": step,
            "tokens": step * options.batch_size * options.length,
            "flops": step * flops,
            "loss": loss.item(),
            "lr": rate,
        }
        if not math.isfinite(row["loss"]):
            raise FloatingPointError(f"the loss is {row['loss']} at step {step}")
        if step % options.validate_every == 0 or step == options.steps:
            row["val_loss"] = validate(model, held_out)
            row["val_bpb"] = row["val_loss"] / math.log(2)  # a token is a byte
        row["seconds"] = time.perf_counter() - start
        rows.append(row)
        on_step(row)
    model.eval()
    return rows


def make_optimizer(model: nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices alone."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=options.betas, fused=True)


def learning_rate(step: int, options: TrainOptions) -> float:
    """Linear warm-up to the peak, then a cosine down to `final_rate` of it at the last step."""
    if step <= options.warmup_steps:
        return options.learning_rate * step / options.warmup_steps
    done = (step - options.warmup_steps) / max(1, options.steps - options.warmup_steps)
    floor = options.final_rate
    return options.learning_rate * (floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2)


def next_token_loss(model: Any, batch: Tensor) -> Tensor:
    """Mean cross-entropy of batch[:, 1:] given what stands before."""
    logits = model(batch[:, :-1], use_cache=False).logits  # [B, T, vocab_size]
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


@torch.no_grad()
def validate(model: Any, batches: list[Tensor]) -> float:
    model.eval()
    losses = [next_token_loss(model, batch).item() for batch in batches]
    model.train()
    return sum(losses) / len(losses)
