"""Building a model from given tensors, without initializing or copying them."""

from typing import TypeVar

import torch
from torch import Tensor

from tokenformer.models.backbone import BlockPreTrainedModel
from tokenformer.models.block_configuration import BlockConfig

ModelT = TypeVar("ModelT", bound=BlockPreTrainedModel)
"""A model class of this package: functions that resize a model return the class they are given."""


def build_model(
    model_class: type[ModelT], config: BlockConfig, tensors: dict[str, Tensor]
) -> ModelT:
    """Return a model that holds `tensors` as its parameters."""
    with torch.device("meta"):
        model = model_class(config)
    missing, unknown = model.load_state_dict(tensors, strict=False, assign=True)
    if unknown:
        raise ValueError(f"the model has no parameter {', '.join(unknown)}")
    model.tie_weights()
    if missing := [name for name in missing if name not in model.all_tied_weights_keys]:
        raise ValueError(f"tensors are missing for {', '.join(missing)}")
    return model
