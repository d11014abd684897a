"""Image classification as a task for the training loop."""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenformer.data.augmentation_options import AugmentationOptions
from tokenformer.data.image_batches import ImageBatch, ImageReader, LazyBatch
from tokenformer.models.accounting import image_training_flops
from tokenformer.models.vision import VisionModelForImageClassification
from tokenformer.train.memory import least_activation_bytes
from tokenformer.train.task import Batch, Task


class ClassificationLoss(nn.Module):
    """A classifier with its loss: maps a batch to its summed cross-entropy in nats and, in eval
    mode, the number of correctly classified images."""

    def __init__(self, model: VisionModelForImageClassification) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: ImageBatch) -> Tensor:
        logits = self.model(batch.pixels).logits.float()  # [B, classes]
        loss = F.cross_entropy(logits, batch.targets, reduction="sum")
        if self.model.training:
            return loss
        correct = (logits.argmax(1) == batch.targets.argmax(1)).sum()
        return torch.stack([loss, correct])


@dataclass
class ImageTask:
    model: VisionModelForImageClassification
    pictures: ImageReader
    held_out: ImageReader | None
    """None for a run without validation."""
    augmentation: AugmentationOptions = field(default_factory=AugmentationOptions)
    seed: int = 0
    module: nn.Module = field(init=False)
    tokens_per_sample: int = field(init=False, default=1)
    flops_per_sample: int = field(init=False)
    chance_loss: float = field(init=False)
    least_activation_bytes: int = field(init=False)
    trained: nn.Module | None = field(init=False, default=None)
    kept: Task | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.module = ClassificationLoss(self.model)
        self.chance_loss = math.log(self.model.config.num_labels)
        self.flops_per_sample = sum(image_training_flops(self.model.config).values())
        config = self.model.config
        self.least_activation_bytes = least_activation_bytes(config, config.num_positions)

    def batch(self, first_sample: int, count: int) -> ImageBatch:
        return self.pictures.training_batch(first_sample, count, self.seed, self.augmentation)

    def count_losses(self, first_sample: int, count: int) -> int:
        return count

    def count_batch_losses(self, batch: Batch) -> int:
        return len(batch)

    def prefetch(self, first_sample: int, count: int) -> None:
        self.pictures.prefetch(first_sample, count, self.seed, self.augmentation)

    def validation(self, batch_size: int, count: int) -> list[LazyBatch]:
        return [] if self.held_out is None else self.held_out.held_out(batch_size, count)

    def describe(self, loss: float, accuracy: float) -> dict[str, float]:
        return {"val_accuracy": accuracy}
