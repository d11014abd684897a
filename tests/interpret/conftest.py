"""Small models whose every token matters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tokenformer


@pytest.fixture
def make_classifier(seed: int) -> Callable[..., Any]:
    """make_classifier(**options): 3 x 3 patches, in float64 and eval mode, with large weights."""

    def make(**options: Any) -> Any:
        shape: dict[str, Any] = {"image_size": 12, "patch_size": 4, "num_channels": 1}
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = tokenformer.TokenformerVisionConfig(
            **{**shape, **sizes, "num_labels": 5, "ffn_tokens": 40, **options}
        )
        model = tokenformer.TokenformerForImageClassification(config).double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.5)
        return model

    return make
