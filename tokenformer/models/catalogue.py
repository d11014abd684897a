"""Which model a configuration is of: all of ours that have a head."""

from typing import Any

from tokenformer.models.configuration import TokenformerConfig, TransformerConfig
from tokenformer.models.language import TokenformerForCausalLM, TransformerForCausalLM
from tokenformer.models.vision import (
    TokenformerForImageClassification,
    TransformerForImageClassification,
)
from tokenformer.models.vision_configuration import (
    TokenformerVisionConfig,
    TransformerVisionConfig,
)

MODELS: dict[type[Any], type[Any]] = {
    TokenformerConfig: TokenformerForCausalLM,
    TransformerConfig: TransformerForCausalLM,
    TokenformerVisionConfig: TokenformerForImageClassification,
    TransformerVisionConfig: TransformerForImageClassification,
}
