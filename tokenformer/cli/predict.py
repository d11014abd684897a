"""`tokenformer predict`: what a classifier sees in images."""

import sys
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenformer.cli.model import load_classifier, resolve_model
from tokenformer.errors import InputError
from tokenformer.paths import exists, expand_user, missing_message

if TYPE_CHECKING:
    from torch import Tensor

BATCH = 16


def predict(
    model: str, images: list[Path], top: int = 3, no_verify: bool = False, json: bool = False
) -> None:
    """Name what is in images, with the most likely classes of each.

    A multi-label model's classes are independent of each other; a regression's values are printed.

    Args:
        model: A model folder, a run folder or a hub name of any image classifier.
        images: Image files.
        top: How many classes to name.
        no_verify: Do not check the weights against checksums.json, nor for NaN and inf.
        json: Print one JSON document.
    """
    if top < 1:
        raise InputError(f"--top {top} must be at least 1")
    if not images:
        raise InputError("IMAGES is missing: tokenformer predict MODEL IMAGE...")
    resolve_model(model, "an image classifier")
    for path in images:
        if not exists(expand_user(path)):
            raise InputError(missing_message(path))

    import torch

    from tokenformer.data.images import decode_file
    from tokenformer.errors import DataError
    from tokenformer.evaluate.classification import as_input, problem_type

    try:
        pictures = [decode_file(expand_user(path)) for path in images]
    except DataError as error:
        raise InputError(str(error)) from None
    classifier, processor = load_classifier(model, verify=not no_verify)
    found: list[list[dict[str, Any]]] = []
    kind = problem_type(classifier.config)
    for start in range(0, len(pictures), BATCH):
        batch = [as_input(pixels, processor) for pixels in pictures[start : start + BATCH]]
        inputs = processor(images=batch, return_tensors="pt")
        pixels = inputs["pixel_values"].to(classifier.device, classifier.dtype)
        with torch.no_grad():
            logits = classifier(pixels).logits
        found += answers(logits.float(), classifier.config.id2label, kind, top)
    if json:
        answer = {str(path): classes for path, classes in zip(images, found, strict=True)}
        sys.stdout.write(dumps(answer, indent=2) + "\n")
        return
    width = max(len(str(path)) for path in images)
    for path, classes in zip(images, found, strict=True):
        named = "  ".join(
            f"{row['label']} {row['share']:.1%}"
            if "share" in row
            else f"{row['label']} {row['value']:.4g}"
            for row in classes
        )
        sys.stdout.write(f"{path!s:<{width}}  {named}\n")


def answers(
    logits: "Tensor", names: dict[int, str], kind: str, top: int
) -> list[list[dict[str, Any]]]:
    """Of logits [B, C], each image's likeliest classes; of a regression, all of its values."""
    if kind == "regression":
        return [
            [{"label": names[number], "value": value} for number, value in enumerate(row)]
            for row in logits.tolist()
        ]
    shares = logits.sigmoid() if kind == "multi_label_classification" else logits.softmax(1)
    likely, places = shares.topk(min(top, logits.shape[1]))
    return [
        [{"label": names[number], "share": share} for number, share in zip(*row, strict=True)]
        for row in zip(places.tolist(), likely.tolist(), strict=True)
    ]
