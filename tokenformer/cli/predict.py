"""`tokenformer predict`: classify images."""

import sys
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenformer.cli.model import adapter_folders, load_classifier, resolve_model
from tokenformer.errors import InputError
from tokenformer.paths import exists, expand_user, missing_message

if TYPE_CHECKING:
    from torch import Tensor

BATCH_SIZE = 16


def predict(
    model: str,
    images: list[Path],
    top: int = 3,
    adapter: tuple[str, ...] = (),
    no_verify: bool = False,
    json: bool = False,
) -> None:
    """Classify images and print the most likely classes of each.

    The probabilities of a multi-label model are independent; a regression prints its values.

    Args:
        model: A model folder, a run folder or a hub name of any image classifier.
        images: Image files.
        top: Number of classes to print.
        adapter: An adapter to use, a folder or NAME=DIR; several, or the option again, are active
            together.
        no_verify: Skip verifying the weights (checksums.json, NaN, inf).
        json: Print one JSON document.
    """
    if top < 1:
        raise InputError(f"--top {top} must be at least 1")
    if not images:
        raise InputError("IMAGES is missing: tokenformer predict MODEL IMAGE...")
    resolve_model(model, "an image classifier")
    adapters = adapter_folders(adapter)
    for path in images:
        if not exists(expand_user(path)):
            raise InputError(missing_message(path))

    import torch

    from tokenformer.data.images import decode_file
    from tokenformer.evaluate.classification import problem_type, to_processor_input

    pictures = [decode_file(expand_user(path)) for path in images]
    classifier, processor = load_classifier(model, verify=not no_verify, adapters=adapters)
    predictions: list[list[dict[str, Any]]] = []
    kind = problem_type(classifier.config)
    for start in range(0, len(pictures), BATCH_SIZE):
        batch = pictures[start : start + BATCH_SIZE]
        inputs = [to_processor_input(pixels, processor) for pixels in batch]
        pixel_values = processor(images=inputs, return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            logits = classifier(pixel_values.to(classifier.device, classifier.dtype)).logits
        predictions += top_classes(logits.float(), classifier.config.id2label, kind, top)
    if json:
        by_path = {str(path): classes for path, classes in zip(images, predictions, strict=True)}
        sys.stdout.write(dumps(by_path, indent=2) + "\n")
        return
    width = max(len(str(path)) for path in images)
    for path, classes in zip(images, predictions, strict=True):
        line = "  ".join(
            f"{row['label']} {row['share']:.1%}"
            if "share" in row
            else f"{row['label']} {row['value']:.4g}"
            for row in classes
        )
        sys.stdout.write(f"{path!s:<{width}}  {line}\n")


def top_classes(
    logits: "Tensor", names: dict[int, str], kind: str, top: int
) -> list[list[dict[str, Any]]]:
    """Return the most likely classes of each image from logits [B, C], or all values of a
    regression."""
    if kind == "regression":
        return [
            [{"label": names[index], "value": value} for index, value in enumerate(row)]
            for row in logits.tolist()
        ]
    multi_label = kind == "multi_label_classification"
    probabilities = logits.sigmoid() if multi_label else logits.softmax(1)
    highest, indices = probabilities.topk(min(top, logits.shape[1]))
    return [
        [{"label": names[index], "share": share} for index, share in zip(*row, strict=True)]
        for row in zip(indices.tolist(), highest.tolist(), strict=True)
    ]
