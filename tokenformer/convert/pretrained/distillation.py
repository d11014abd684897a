"""A converted model brought back to what its source says: a short training run on its logits.

The loss is the Kullback-Leibler divergence of ours from the source's next-token distribution. It
begins near zero, and Adam's steps are as long where there is little to gain as where there is much:
the rate must be far below one for training from scratch. Nothing else of the loop differs.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenformer.data.token_ids import TokenSequence
from tokenformer.train.loop import Loop, train
from tokenformer.train.metrics import Row
from tokenformer.train.options import OptimizerOptions, RunOptions, ScheduleOptions
from tokenformer.train.task import LanguageTask


class DivergenceLoss(nn.Module):
    """[B, T + 1] token ids -> the divergence from the source, summed over B T tokens."""

    def __init__(self, model: Any, source: Any) -> None:
        super().__init__()
        self.model = model
        self.source = [source]  # not a submodule: it is neither trained nor sharded

    def forward(self, tokens: Tensor) -> Tensor:
        inputs = tokens[:, :-1]
        with torch.no_grad():
            wanted = self.source[0](input_ids=inputs, use_cache=False).logits
        found = self.model(input_ids=inputs, use_cache=False).logits
        return F.kl_div(
            found.float().log_softmax(-1),
            wanted.float().log_softmax(-1),
            reduction="sum",
            log_target=True,
        )


@dataclass
class DistillationTask(LanguageTask):
    """Text as the source of it sees it: the loop's task whose loss is the divergence."""

    source: Any = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.module = DivergenceLoss(self.model, self.source.eval())
        self.flops_per_sample += 2 * self.source.num_parameters() * self.length

    def describe(self, loss: float) -> dict[str, float]:
        return {"val_divergence": loss}


def distil(
    model: Any,
    source: Any,
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
    """Train `model` in place towards `source`; returns a row of metrics for every step."""
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
            spike_factor=1e6,  # a loss that begins at nothing may multiply
        ),
    )
    return train(loop, on_step)
