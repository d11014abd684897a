"""Writing the text of images, captions or answers, as a task for the training loop.

Every sample counts equally: its loss is the mean over its tokens with labels. So the loss does not
depend on how a batch is divided into micro-batches and ranks.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tokenformer.data.image_text_batches import (
    ImageTextBatch,
    ImageTextReader,
    LazyImageTextBatch,
)
from tokenformer.models.accounting import image_text_training_flops
from tokenformer.models.image_text import IGNORED, TokenformerForImageTextToText
from tokenformer.train.loss import chunked_cross_entropy
from tokenformer.train.memory import least_activation_bytes
from tokenformer.train.task import Batch, Task


class ImageTextLoss(nn.Module):
    """A vision-language model with its loss: maps a batch to the sum of the mean losses of its
    samples, in nats. In eval mode also to the sum of the losses of all tokens and to the bytes of
    their text."""

    def __init__(self, model: TokenformerForImageTextToText) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: ImageTextBatch) -> Tensor:
        hidden = self.model.model(
            input_ids=batch.ids, pixel_values=batch.pixels, use_cache=False
        ).last_hidden_state[:, :-1]  # [B, T - 1, d]
        labels = self.model.text_labels(batch.labels, batch.ids)[:, 1:]
        counts = (labels != IGNORED).sum(1, keepdim=True).clamp_min(1)  # [B, 1]
        rows = labels != IGNORED  # only these need logits
        hidden, weights = hidden[rows], (1 / counts).expand_as(labels)[rows]
        head, labels = self.model.lm_head.weight, labels[rows]
        loss = chunked_cross_entropy(hidden, head, labels, weights=weights)
        if not self.model.training:
            whole = chunked_cross_entropy(hidden, head, labels)
            return torch.stack([loss, whole, loss.new_tensor(batch.target_bytes)])
        if batch.pixels is None:
            loss = loss + self.no_images()
        return loss

    def no_images(self) -> Tensor:
        """Return 0, with a gradient of 0 for what embeds images: DDP waits for a gradient of every
        parameter, also in a batch without images."""
        parameters = self.model.model.images.parameters()
        used = [parameter.sum() for parameter in parameters if parameter.requires_grad]
        return 0 * torch.stack(used).sum() if used else torch.zeros(())


@dataclass
class ImageTextTask:
    model: TokenformerForImageTextToText
    samples: ImageTextReader
    held_out: ImageTextReader | None
    """None for a run without validation."""
    length: int
    """The most tokens of text in a sample."""
    seed: int = 0
    module: nn.Module = field(init=False)
    trained: nn.Module | None = field(init=False, default=None)
    kept: Task | None = field(init=False, default=None)
    tokens_per_sample: int = field(init=False, default=1)
    flops_per_sample: int = field(init=False)
    chance_loss: float = field(init=False)
    least_activation_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        config = self.model.config
        self.module = ImageTextLoss(self.model)
        self.chance_loss = math.log(config.vocab_size)
        self.flops_per_sample = sum(image_text_training_flops(config, self.length).values())
        positions = config.vision_config.num_positions
        self.least_activation_bytes = least_activation_bytes(config, positions)

    def batch(self, first_sample: int, count: int) -> ImageTextBatch:
        return self.samples.training_batch(first_sample, count, self.seed)

    def count_losses(self, first_sample: int, count: int) -> int:
        return count

    def count_batch_losses(self, batch: Batch) -> int:
        return len(batch)

    def prefetch(self, first_sample: int, count: int) -> None:
        self.samples.prefetch(first_sample, count, self.seed)

    def validation(self, batch_size: int, count: int) -> list[LazyImageTextBatch]:
        return [] if self.held_out is None else self.held_out.held_out(batch_size, count)

    def describe(self, loss: float, whole: float, size: float) -> dict[str, float]:
        return {"val_bpb": whole / math.log(2) / size} if size else {}
