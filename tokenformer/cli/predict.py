"""`tokenformer predict`: what a classifier sees in images."""

import sys
from json import dumps
from pathlib import Path
from typing import Any

from tokenformer.cli.errors import InputError

BATCH = 16


def predict(model: str, images: list[Path], top: int = 3, json: bool = False) -> None:
    """Name what is in images, with the most likely classes of each.

    Args:
        model: A folder or hub name of an image classifier, ours or any other.
        images: Image files.
        top: How many classes to name.
        json: Print one JSON document.
    """
    if top < 1:
        raise InputError(f"--top {top} must be at least 1")
    if not images:
        raise InputError("no images are given: tokenformer predict MODEL IMAGE...")

    import torch

    from tokenformer.cli.model import load_classifier
    from tokenformer.data.errors import DataError
    from tokenformer.data.images import decoded
    from tokenformer.evaluate.classification import as_input

    try:
        pictures = [decoded(path) for path in images]
    except DataError as error:
        raise InputError(str(error)) from None
    classifier, processor = load_classifier(model)
    found: list[list[dict[str, Any]]] = []
    for start in range(0, len(pictures), BATCH):
        batch = [as_input(pixels, processor) for pixels in pictures[start : start + BATCH]]
        inputs = processor(images=batch, return_tensors="pt")
        pixels = inputs["pixel_values"].to(classifier.device, classifier.dtype)
        with torch.no_grad():
            logits = classifier(pixels).logits
        shares, places = logits.float().softmax(1).topk(min(top, logits.shape[1]))
        names = classifier.config.id2label
        for likely, numbers in zip(shares.tolist(), places.tolist(), strict=True):
            pairs = zip(numbers, likely, strict=True)
            found.append([{"label": names[number], "share": share} for number, share in pairs])
    if json:
        answer = {str(path): classes for path, classes in zip(images, found, strict=True)}
        sys.stdout.write(dumps(answer, indent=2) + "\n")
        return
    width = max(len(str(path)) for path in images)
    for path, classes in zip(images, found, strict=True):
        named = "  ".join(f"{row['label']} {row['share']:.1%}" for row in classes)
        sys.stdout.write(f"{path!s:<{width}}  {named}\n")
