"""The model class of each configuration class, with its head."""

from typing import Any

import torch

from tokenformer.models.block_configuration import BlockConfig
from tokenformer.models.configuration import (
    CONFIG_CLASSES,
    TokenformerConfig,
    TokenformerVisionConfig,
    TransformerConfig,
    TransformerVisionConfig,
)
from tokenformer.models.image_text import TokenformerForImageTextToText
from tokenformer.models.image_text_configuration import TokenformerImageTextConfig
from tokenformer.models.language import (
    LanguageModelForCausalLM,
    TokenformerForCausalLM,
    TransformerForCausalLM,
)
from tokenformer.models.vision import (
    TokenformerForImageClassification,
    TransformerForImageClassification,
    VisionModelForImageClassification,
)

HeadModel = LanguageModelForCausalLM | VisionModelForImageClassification

MODEL_CLASSES: dict[type[BlockConfig], type[HeadModel]] = {
    TokenformerConfig: TokenformerForCausalLM,
    TransformerConfig: TransformerForCausalLM,
    TokenformerVisionConfig: TokenformerForImageClassification,
    TransformerVisionConfig: TransformerForImageClassification,
    TokenformerImageTextConfig: TokenformerForImageTextToText,
}


def build_on_meta(config: BlockConfig | dict[str, Any]) -> HeadModel:
    """Build a model without weights, on the meta device, from a configuration or its dict."""
    found: Any = config
    if isinstance(config, dict):
        found = CONFIG_CLASSES[config["model_type"]].from_dict(config)
    with torch.device("meta"):
        return MODEL_CLASSES[type(found)](found)
