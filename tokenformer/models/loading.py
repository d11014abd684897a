"""Models from their folders, whole: transformers itself draws at random what it does not find."""

from collections.abc import Iterable
from typing import Any

MOST_NAMED = 12


class IncompleteModelError(ValueError):
    """A folder lacks weights of its model, or has them in another shape."""


def load_whole(model_class: Any, name: str, **options: Any) -> Any:
    """`model_class.from_pretrained`, without any code that the folder may bring: left out,
    `trust_remote_code` asks on the terminal."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what is amiss is told below, in a line
    try:
        model, found = model_class.from_pretrained(
            name,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
    finally:
        logging.set_verbosity(verbosity)
    misshaped = [
        f"{key} {[*shape]} for {[*wanted]}"
        for key, shape, wanted in sorted(found["mismatched_keys"])
    ]
    problems = {"missing": sorted(found["missing_keys"]), "of the wrong shape": misshaped}
    if lines := [f"{what} are {shown(keys)}" for what, keys in problems.items() if keys]:
        raise IncompleteModelError("; ".join(lines))
    return model


def load_for_training(model_class: Any, folder: str) -> Any:
    """In fp32, whatever it was saved in: rates are too small for the steps of half precision, and
    what is resumed is made anew from the configuration."""
    import torch

    model = load_whole(model_class, folder, dtype=torch.float32)
    if getattr(model, "is_quantized", False):
        raise ValueError(f"{folder} has rounded numbers; begin with the model it was made from")
    return model


def shown(names: Iterable[str]) -> str:
    """Names in a line, of many the first."""
    names = list(names)
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
