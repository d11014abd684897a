"""Prompts with completions, or chats, as a task for the training loop."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tokenformer.data.examples import ExampleSplit
from tokenformer.train.task import LanguageTask


@dataclass
class ExampleTask(LanguageTask):
    """Next-token prediction of completions. A sample is one example; `tokens_per_sample`, which
    counts compute, is its largest size."""

    examples: ExampleSplit = field(kw_only=True)
    held_out: ExampleSplit | None = field(kw_only=True)

    def batch(self, first_sample: int, count: int) -> Tensor:
        return torch.from_numpy(
            self.examples.batch(
                length=self.length,
                seed=self.seed,
                first_sample=first_sample,
                count=count,
                mode=self.order,
            )
        )

    def count_losses(self, first_sample: int, count: int) -> int:
        return self.count_batch_losses(self.batch(first_sample, count))

    def validation(self, batch_size: int, count: int) -> list[Tensor]:
        if self.held_out is None:
            return []
        batches = self.held_out.fixed_batches(
            batch_size=batch_size, length=self.length, count=count
        )
        return [torch.from_numpy(batch) for batch in batches]
