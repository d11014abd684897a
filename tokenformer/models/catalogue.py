"""Which model a configuration is of: all of ours that have a head."""

from typing import Any

import torch

from tokenformer.models.configuration import (
    TokenformerConfig,
    TokenformerVisionConfig,
    TransformerConfig,
    TransformerVisionConfig,
)
from tokenformer.models.language import TokenformerForCausalLM, TransformerForCausalLM
from tokenformer.models.vision import (
    TokenformerForImageClassification,
    TransformerForImageClassification,
)

MODELS: dict[type[Any], type[Any]] = {
    TokenformerConfig: TokenformerForCausalLM,
    TransformerConfig: TransformerForCausalLM,
    TokenformerVisionConfig: TokenformerForImageClassification,
    TransformerVisionConfig: TransformerForImageClassification,
}


def blank(config: Any) -> Any:
    """A model of a configuration, or of one that was saved, on the meta device."""
    if isinstance(config, dict):
        config_class = {known.model_type: known for known in MODELS}[config["model_type"]]
        config = config_class.from_dict(config)
    with torch.device("meta"):
        return MODELS[type(config)](config)
