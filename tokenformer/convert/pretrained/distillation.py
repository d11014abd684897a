"""Distillation: a short training run of a converted model on the logits of its source.

The loss is the KL divergence of our next-token distribution from the source's. It starts near zero,
and the size of Adam's steps does not shrink with the gradient, so the learning rate must be far
below that of training from scratch. The training loop is the usual one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from tokenformer.data.corpus import TokenSequence
from tokenformer.models.language import TokenformerForCausalLM
from tokenformer.train.loop import Loop, train
from tokenformer.train.metrics import Row
from tokenformer.train.options import OptimizerOptions, RunOptions, ScheduleOptions
from tokenformer.train.task import LanguageTask


class DivergenceLoss(nn.Module):
    """Token ids [B, T + 1] -> KL divergence from the source, summed over B T tokens."""

    def __init__(self, model: PreTrainedModel, source: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.source = [source]  # in a list, so not a submodule: neither trained nor sharded

    def forward(self, tokens: Tensor) -> Tensor:
        inputs = tokens[:, :-1]
        with torch.no_grad():
            target = self.source[0](input_ids=inputs, use_cache=False).logits
        logits = self.model(input_ids=inputs, use_cache=False).logits
        return F.kl_div(
            logits.float().log_softmax(-1),
            target.float().log_softmax(-1),
            reduction="sum",
            log_target=True,
        )


@dataclass
class DistillationTask(LanguageTask):
    """Language modelling with the divergence from the source as loss."""

    source: PreTrainedModel = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.module = DivergenceLoss(self.model, self.source.eval())
        self.flops_per_sample += 2 * self.source.num_parameters() * self.length

    def describe(self, loss: float) -> dict[str, float]:
        return {"val_divergence": loss}


def distill_model(
    model: TokenformerForCausalLM,
    source: PreTrainedModel,
    tokens: TokenSequence,
    held_out: TokenSequence,
    *,
    steps: int,
    length: int,
    batch_size: int = 8,
    learning_rate: float = 3e-5,
    seed: int = 0,
    on_step: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Train `model` in place to match `source`; return the metrics of every step."""
    task = DistillationTask(model, tokens, held_out, length, seed=seed, source=source)
    loop = Loop(
        task,
        OptimizerOptions(learning_rate=learning_rate, weight_decay=0.0),
        ScheduleOptions(warmup_steps=max(1, steps // 20)),
        RunOptions(
            steps=steps,
            batch_size=batch_size,
            seed=seed,
            validate_every=max(1, steps // 4),
            validation_sequences=16,
            spike_factor=1e6,  # the loss starts near zero, so large factors are normal
        ),
    )
    return train(loop, on_step)
