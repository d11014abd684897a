"""Small image classifiers and inputs for them."""

from typing import Any

import torch

import tokenformer
from tokenformer.models.model_classes import MODEL_CLASSES


def vision_config_class(family: str) -> Any:
    return {
        "tokenformer": tokenformer.TokenformerVisionConfig,
        "transformer": tokenformer.TransformerVisionConfig,
    }[family]


def make_classifier(family: str, **options: Any) -> Any:
    """A tiny classifier of 12 x 12 random_images, with weights large enough to move the logits."""
    shape = {
        "image_size": 12,
        "patch_size": 4,
        "num_channels": 2,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_classes": 5,
    }
    torch.manual_seed(0)
    config = vision_config_class(family)(**{**shape, **options})
    model = MODEL_CLASSES[type(config)](config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model


def random_images(size: int = 12, count: int = 3) -> torch.Tensor:
    return torch.randn(count, 2, size, size, generator=torch.Generator().manual_seed(1)).double()
