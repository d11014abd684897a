"""How well a classifier names images: top-1, top-5, and what it takes for what.

Any Hugging Face image classifier serves, with its own image processor. Classes are matched by name;
by number only where that is asked for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tokenformer.data.images import ImageSet
from tokenformer.errors import DataError
from tokenformer.models.pixels import Pixels, convert_channels, to_pillow

SINGLE_LABEL = "single_label_classification"
FEW = 5
"""How many guesses the second figure allows."""
BATCH = 64
WORST = 5
MOST_NAMED = 5
"""Classes that a message lists."""


@dataclass(frozen=True)
class Classification:
    top_1: float
    top_5: float
    loss: float
    """Mean cross-entropy in nats."""
    confusion: npt.NDArray[
        np.int64
    ]  # [classes, classes]: of a class, how many were taken for which
    classes: list[str]

    @property
    def images(self) -> int:
        return int(self.confusion.sum())

    @property
    def worst(self) -> list[tuple[str, str, int]]:
        """The most frequent mistakes: a class, what it was taken for, and how often."""
        wrong = self.confusion.copy()
        np.fill_diagonal(wrong, 0)
        places = np.argsort(-wrong, axis=None, kind="stable")[:WORST]
        rows, columns = np.unravel_index(places, wrong.shape)
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
            lines.append(f"most mistaken     {mistakes}")
        return "\n".join(lines)


@torch.no_grad()
def classify(
    model: Any,
    processor: Any,
    pictures: ImageSet,
    *,
    batch_size: int | None = None,
    limit: int | None = None,
    labels_by_index: bool = False,
    on_images: Callable[[int], None] = lambda done: None,
) -> Classification:
    """Measure `model` on the first `limit` of `pictures`, by default on all."""
    if (kind := problem_type(model.config)) != SINGLE_LABEL:
        raise DataError(
            f"the model's problem_type is {kind}; accuracy is measured of {SINGLE_LABEL} only"
        )
    labels, names = class_numbers(model.config, pictures.classes, labels_by_index)
    count = len(pictures) if limit is None else min(limit, len(pictures))
    confusion = np.zeros((len(names), len(names)), np.int64)
    in_few, loss = 0, 0.0
    size = batch_size or BATCH
    for start in range(0, count, size):
        found = [pictures.picture(place) for place in range(start, min(count, start + size))]
        images = [as_input(pixels, processor) for pixels, _ in found]
        inputs = processor(images=images, return_tensors="pt")["pixel_values"]
        logits = model(pixel_values=inputs.to(model.device, model.dtype)).logits.float().cpu()
        wanted = torch.tensor([labels[label] for _, label in found])  # [B]
        guesses = logits.topk(min(FEW, logits.shape[1])).indices  # [B, 5]
        in_few += int((guesses == wanted[:, None]).any(1).sum())
        loss += torch.nn.functional.cross_entropy(logits, wanted, reduction="sum").item()
        np.add.at(confusion, (wanted.numpy(), guesses[:, 0].numpy()), 1)
        on_images(start + len(found))
    return Classification(
        top_1=float(np.trace(confusion)) / count,
        top_5=in_few / count,
        loss=loss / count,
        confusion=confusion,
        classes=names,
    )


def problem_type(config: Any) -> str:
    """What a classifier's outputs mean, by transformers' names. Where its configuration does not
    say, one output is a regression, as in the losses of transformers."""
    if config.problem_type is not None:
        return str(config.problem_type)
    return "regression" if config.num_labels == 1 else SINGLE_LABEL


def as_input(pixels: Pixels, processor: Any) -> Any:
    """A Pillow image in colour, or grey where the processor's mean is of one channel: most of
    transformers' processors norm grey images by three means, and fail."""
    mean = getattr(processor, "image_mean", None)
    is_gray = isinstance(mean, list | tuple) and len(mean) == 1
    return to_pillow(convert_channels(pixels, 1 if is_gray else 3))


def class_numbers(
    config: Any, classes: list[str], by_index: bool = False
) -> tuple[list[int], list[str]]:
    """The model's number for every class of a set, and the name of each number."""
    names = [str(config.id2label[number]) for number in range(config.num_labels)]
    if by_index:
        if len(classes) > len(names):
            raise DataError(
                f"the images have {len(classes)} classes, the model only {len(names)}; "
                "--labels_by_index needs as many"
            )
        return list(range(len(classes))), [*classes, *names[len(classes) :]]
    unknown = [name for name in classes if name not in set(names)]
    if not unknown:
        return [names.index(name) for name in classes], names
    raise DataError(
        f"the model does not know {len(unknown)} of the {len(classes)} classes of the images: "
        f"{listed(unknown)}; its own are {listed(names)}; if both number their classes alike, "
        "give --labels_by_index"
    )


def listed(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
