"""A model put together of given tensors."""

from typing import Any

import torch
from torch import Tensor


def assemble(model_class: Any, config: Any, tensors: dict[str, Tensor]) -> Any:
    """A model of these very tensors: none is copied."""
    with torch.device("meta"):
        model = model_class(config)
    _, unknown = model.load_state_dict(tensors, strict=False, assign=True)
    if unknown:
        raise ValueError(f"the model has no place for {', '.join(unknown)}")
    model.tie_weights()
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise ValueError(f"the model lacks {', '.join(missing)}")
    return model
