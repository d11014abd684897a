"""What is trained, as the loop sees it: samples by number, and a module that maps them to a loss.

The loop knows a task, not a modality. `LanguageTask` is next-token prediction; `image_task` has the
classification of images.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tokenformer.data.batches import fixed_batches, sample_batch
from tokenformer.data.corpus import TokenSequence
from tokenformer.models.accounting import training_flops
from tokenformer.train.loss import chunked_cross_entropy
from tokenformer.train.memory import least_activation_bytes


class Batch(Protocol):
    """Samples: a tensor, or several that belong together."""

    def __len__(self) -> int: ...

    def to(self, device: torch.device, /) -> Any:
        """As the task's module takes it."""
        ...


class Task(Protocol):
    model: Any
    """The Hugging Face model: saved, loaded and exported."""
    module: nn.Module
    """Maps a batch to the sum of its losses; what DDP and FSDP wrap. In eval mode other sums over
    the samples may follow it: [1 + n]."""
    tokens_per_sample: int
    """Losses in a sample's sum, and the unit of throughput."""
    flops_per_sample: int
    """Training FLOPs, forward and backward."""
    chance_loss: float
    """Mean loss of one who guesses evenly, in nats."""
    least_activation_bytes: int
    """Bytes that a sample keeps for the backward pass in fp32, at the very least."""

    def batch(self, first_sample: int, count: int) -> Batch:
        """Samples by their number since the start of training: a pure function of it."""
        ...

    def prefetch(self, first_sample: int, count: int) -> None:
        """Start to prepare the samples that are needed next, if that takes time."""
        ...

    def validation(self, batch_size: int, count: int) -> Sequence[Batch]:
        """At most `count` samples, always the same, in batches."""
        ...

    @property
    def describe(self) -> Callable[..., dict[str, float]]:
        """(mean validation loss, other means, ...) -> what they mean: bits per byte, accuracy."""
        ...


class NextTokenLoss(nn.Module):
    """A causal language model with its loss: [B, T + 1] token ids -> the sum over B T tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        hidden = self.model.model(input_ids=inputs, use_cache=False).last_hidden_state
        return chunked_cross_entropy(hidden, self.model.lm_head.weight, targets)


@dataclass
class LanguageTask:
    model: Any
    tokens: TokenSequence
    validation_tokens: TokenSequence | None
    """None for a run that does not validate."""
    length: int
    seed: int = 0
    order: str = "random"
    bytes_per_token: float = 1.0
    """Of the validation text, for bits per byte."""
    module: nn.Module = field(init=False)
    tokens_per_sample: int = field(init=False)
    flops_per_sample: int = field(init=False)
    chance_loss: float = field(init=False)
    least_activation_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.module = NextTokenLoss(self.model)
        self.tokens_per_sample = self.length
        self.chance_loss = math.log(self.model.config.vocab_size)
        self.flops_per_sample = sum(training_flops(self.model.config, self.length).values())
        self.least_activation_bytes = least_activation_bytes(self.model.config, self.length)

    def batch(self, first_sample: int, count: int) -> Tensor:
        return sample_batch(
            self.tokens,
            length=self.length,
            seed=self.seed,
            first_sample=first_sample,
            count=count,
            mode=self.order,
        )

    def prefetch(self, first_sample: int, count: int) -> None:
        """Token ids need no preparation."""

    def validation(self, batch_size: int, count: int) -> list[Tensor]:
        if self.validation_tokens is None:
            return []
        # One by one, so that which windows they are does not depend on the batch size.
        samples = fixed_batches(
            self.validation_tokens, batch_size=1, length=self.length, count=count
        )
        return list(torch.cat(samples).split(batch_size))

    def describe(self, loss: float) -> dict[str, float]:
        return {"val_bpb": loss / math.log(2) / self.bytes_per_token}
