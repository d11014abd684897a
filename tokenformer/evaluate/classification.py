"""Accuracy of an image classifier: top-1, top-5, and the confusion matrix.

Works with any Hugging Face image classifier and its image processor. Classes are matched by name,
or by index on request.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from tokenformer.data.images import ImageSet
from tokenformer.errors import DataError
from tokenformer.models.pixels import Pixels, convert_channels, to_pillow

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import BaseImageProcessor, PretrainedConfig, PreTrainedModel

SINGLE_LABEL = "single_label_classification"
TOP_K = 5
BATCH_SIZE = 64
LISTED_MISTAKES = 5
LISTED_CLASSES = 5
"""Classes that an error message lists."""
LABELLED_CLASSES = 30
"""A confusion matrix with more classes is plotted without names and numbers."""


@dataclass(frozen=True)
class Classification:
    top_1: float
    top_5: float
    loss: float
    """Mean cross-entropy in nats."""
    confusion: npt.NDArray[np.int64]
    """Image counts [true class, predicted class]."""
    classes: list[str]

    @property
    def images(self) -> int:
        return int(self.confusion.sum())

    @property
    def worst(self) -> list[tuple[str, str, int]]:
        """The most frequent mistakes: true class, predicted class and count."""
        wrong = self.confusion.copy()
        np.fill_diagonal(wrong, 0)
        largest = np.argsort(-wrong, axis=None, kind="stable")[:LISTED_MISTAKES]
        rows, columns = np.unravel_index(largest, wrong.shape)
        return [
            (self.classes[row], self.classes[column], int(wrong[row, column]))
            for row, column in zip(rows, columns, strict=True)
            if wrong[row, column]
        ]

    def asdict(self) -> dict[str, Any]:
        return {
            "images": self.images,
            "top_1": self.top_1,
            "top_5": self.top_5,
            "loss": self.loss,
            "classes": self.classes,
            "confusion": self.confusion.tolist(),
        }

    def __str__(self) -> str:
        lines = [
            f"top-1 accuracy    {self.top_1:.2%}",
            f"top-5 accuracy    {self.top_5:.2%}",
            f"loss              {self.loss:.4f}",
        ]
        if self.worst:
            mistakes = "; ".join(f"{a} as {b} ({count})" for a, b, count in self.worst)
            lines.append(f"most confused     {mistakes}")
        return "\n".join(lines)


@torch.no_grad()
def measure_accuracy(
    model: "PreTrainedModel",
    processor: "BaseImageProcessor",
    images: ImageSet,
    *,
    batch_size: int | None = None,
    limit: int | None = None,
    labels_by_index: bool = False,
    on_images: Callable[[int], None] = lambda done: None,
) -> Classification:
    """Measure accuracy on the first `limit` images, by default on all of them. `on_images` receives
    how many are done."""
    if (kind := problem_type(model.config)) != SINGLE_LABEL:
        raise DataError(f"the model's problem_type is {kind}; accuracy needs {SINGLE_LABEL}")
    labels, names = match_classes(model.config, images.classes, labels_by_index)
    count = len(images) if limit is None else min(limit, len(images))
    confusion = np.zeros((len(names), len(names)), np.int64)
    top_k_hits, loss = 0, 0.0
    size = batch_size or BATCH_SIZE
    for start in range(0, count, size):
        batch = [images.picture(index) for index in range(start, min(count, start + size))]
        inputs = [to_processor_input(pixels, processor) for pixels, _ in batch]
        pixel_values = processor(images=inputs, return_tensors="pt")["pixel_values"]
        pixel_values = pixel_values.to(model.device, model.dtype)
        logits = model(pixel_values=pixel_values).logits.float().cpu()
        targets = torch.tensor([labels[label] for _, label in batch])  # [B]
        predictions = logits.topk(min(TOP_K, logits.shape[1])).indices  # [B, 5]
        top_k_hits += int((predictions == targets[:, None]).any(1).sum())
        loss += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
        np.add.at(confusion, (targets.numpy(), predictions[:, 0].numpy()), 1)
        on_images(start + len(batch))
    return Classification(
        top_1=float(np.trace(confusion)) / count,
        top_5=top_k_hits / count,
        loss=loss / count,
        confusion=confusion,
        classes=names,
    )


def problem_type(config: "PretrainedConfig") -> str:
    """Return transformers' `problem_type` of a classifier. If the configuration does not set it, a
    single output is a regression, as in the losses of transformers."""
    if config.problem_type is not None:
        return str(config.problem_type)
    return "regression" if config.num_labels == 1 else SINGLE_LABEL


def to_processor_input(pixels: Pixels, processor: "BaseImageProcessor") -> "Image":
    """Return an RGB image, or a grayscale one if the processor's mean has one channel. Most image
    processors of transformers fail on grayscale images because their mean has three channels."""
    mean = getattr(processor, "image_mean", None)
    grayscale = isinstance(mean, list | tuple) and len(mean) == 1
    image: Image = to_pillow(convert_channels(pixels, 1 if grayscale else 3))
    return image


def match_classes(
    config: "PretrainedConfig", classes: list[str], by_index: bool = False
) -> tuple[list[int], list[str]]:
    """Return the model's index of each class of an image set, and the names of the model's
    classes."""
    names = [str(config.id2label[index]) for index in range(config.num_labels)]
    if by_index:
        if len(classes) > len(names):
            raise DataError(
                f"the images have {len(classes)} classes, the model only {len(names)}; "
                "--labels_by_index needs at least as many"
            )
        return list(range(len(classes))), [*classes, *names[len(classes) :]]
    unknown = [name for name in classes if name not in set(names)]
    if not unknown:
        return [names.index(name) for name in classes], names
    raise DataError(
        f"the model does not know {len(unknown)} of the {len(classes)} classes of the images: "
        f"{listed(unknown)}; its own are {listed(names)}; if both number their classes alike, "
        "use --labels_by_index"
    )


def listed(names: list[str]) -> str:
    more = f" and {len(names) - LISTED_CLASSES} more" if len(names) > LISTED_CLASSES else ""
    return ", ".join(names[:LISTED_CLASSES]) + more


def plot_confusion(result: Classification, path: Path, title: str) -> None:
    """Save a plot of the confusion matrix, as fractions of each true class."""
    from matplotlib.figure import Figure

    totals = result.confusion.sum(1, keepdims=True)
    fractions = result.confusion / np.maximum(totals, 1)  # rows sum to 1, or 0 without images
    labelled = len(result.classes) <= LABELLED_CLASSES
    side = 2 + 0.55 * len(result.classes) if labelled else 8
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(fractions, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, label="fraction of the class", shrink=0.8)
    if labelled:
        ticks = range(len(result.classes))
        axes.set_xticks(ticks, result.classes, rotation=45, ha="right")
        axes.set_yticks(ticks, result.classes)
        for row, column in zip(*np.nonzero(fractions >= 0.005), strict=True):
            dark = fractions[row, column] > 0.5
            axes.text(column, row, f"{fractions[row, column]:.0%}", ha="center", va="center",
                      fontsize=7, color="white" if dark else "black")  # fmt: skip
    axes.set(xlabel="predicted", ylabel="true", title=f"{title}: {result.top_1:.1%} correct")
    figure.savefig(path, dpi=150)
