"""The interface between the training loop and a modality: samples by index, a module with a loss.

`LanguageTask` is next-token prediction; `image_task` has image classification.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from tokenformer.data.batches import fixed_batches, sample_batch
from tokenformer.data.corpus import TokenSequence
from tokenformer.layers.int8 import Int8Linear
from tokenformer.models.accounting import training_flops
from tokenformer.models.language import LanguageModelForCausalLM
from tokenformer.train.loss import IGNORED, chunked_cross_entropy
from tokenformer.train.memory import least_activation_bytes


class Batch(Protocol):
    """Samples: a tensor, or several of equal length."""

    def __len__(self) -> int: ...

    def to(self, device: torch.device, /) -> Any:
        """Return the batch on a device, as the task's module takes it."""
        ...


class Task(Protocol):
    model: PreTrainedModel
    """The Hugging Face model to save, load and export."""
    module: nn.Module
    """Maps a batch to the sum of its losses; wrapped by DDP or FSDP. In eval mode it may return
    further sums over the samples: [1 + n]."""
    tokens_per_sample: int
    """Number of losses per sample, and the unit of throughput."""
    flops_per_sample: int
    """Training FLOPs, forward and backward."""
    chance_loss: float
    """Mean loss of a uniform prediction, in nats."""
    least_activation_bytes: int
    """Lower bound on the bytes per sample kept for the backward pass in fp32."""
    trained: nn.Module | None
    """The part of the model that trains and that a checkpoint holds; None for all of it."""
    kept: "Task | None"
    """Other data to measure the same module on; of this task only held-out samples are used."""

    def batch(self, first_sample: int, count: int) -> Batch:
        """Return samples by index since the start of training; a pure function of it."""
        ...

    def count_losses(self, first_sample: int, count: int) -> int:
        """Return how many losses the module sums up for `batch(first_sample, count)`."""
        ...

    def count_batch_losses(self, batch: Batch) -> int:
        """Return how many losses the module sums up for a batch."""
        ...

    def prefetch(self, first_sample: int, count: int) -> None:
        """Start to prepare the samples that are needed next, if that takes time."""
        ...

    def validation(self, batch_size: int, count: int) -> Sequence[Batch]:
        """Return at most `count` held-out samples, always the same, in batches."""
        ...

    @property
    def describe(self) -> Callable[..., dict[str, float]]:
        """Map (mean held-out loss, other means, ...) to metrics: bits per byte, accuracy."""
        ...


class NextTokenLoss(nn.Module):
    """A causal language model with its loss: maps token ids [B, T + 1] to the summed loss.

    A negative number is a token without a loss, such as one of a prompt: `~id` for a token id
    (`data.examples`).
    """

    def __init__(self, model: LanguageModelForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        inputs = torch.maximum(tokens, ~tokens)[:, :-1]  # ~(~id) is id
        targets = tokens[:, 1:]
        targets = targets.masked_fill(targets < 0, IGNORED)
        hidden = self.model.model(input_ids=inputs, use_cache=False).last_hidden_state
        return chunked_cross_entropy(hidden, self.output_embedding(hidden.dtype), targets)

    def output_embedding(self, dtype: torch.dtype) -> Tensor:
        head = self.model.lm_head
        return head.dequantized(dtype) if isinstance(head, Int8Linear) else head.weight


@dataclass
class LanguageTask:
    model: LanguageModelForCausalLM
    tokens: TokenSequence
    validation_tokens: TokenSequence | None
    """None for a run without validation."""
    length: int
    seed: int = 0
    order: str = "random"
    bytes_per_token: float = 1.0
    """Bytes per token of the validation text, for bits per byte."""
    module: nn.Module = field(init=False)
    tokens_per_sample: int = field(init=False)
    flops_per_sample: int = field(init=False)
    chance_loss: float = field(init=False)
    least_activation_bytes: int = field(init=False)
    trained: nn.Module | None = field(init=False, default=None)
    kept: Task | None = field(init=False, default=None)

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

    def count_losses(self, first_sample: int, count: int) -> int:
        return count * self.length

    def count_batch_losses(self, batch: Batch) -> int:
        assert isinstance(batch, Tensor)
        return int((batch[:, 1:] >= 0).sum())

    def prefetch(self, first_sample: int, count: int) -> None:
        """Token ids need no preparation."""

    def validation(self, batch_size: int, count: int) -> list[Tensor]:
        if self.validation_tokens is None:
            return []
        # One at a time, so that the samples do not depend on the batch size.
        samples = fixed_batches(
            self.validation_tokens, batch_size=1, length=self.length, count=count
        )
        return list(torch.cat(samples).split(batch_size))

    def describe(self, loss: float) -> dict[str, float]:
        return {"val_bpb": loss / math.log(2) / self.bytes_per_token}
