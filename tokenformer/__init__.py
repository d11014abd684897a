"""Models whose parameters are tokens.

    import tokenformer

    layer = tokenformer.Pattention(768, 768, num_tokens=576)
    model = tokenformer.TokenformerForCausalLM(tokenformer.TokenformerConfig.from_preset("124m"))

Importing the package imports neither torch nor transformers: names are loaded on first use
(PEP 562), and our models are registered with transformers' Auto classes when those are loaded.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tokenformer.models.registration import register_when_imported

if TYPE_CHECKING:
    from tokenformer import interpret as interpret
    from tokenformer.adapters import TokenAdapterConfig
    from tokenformer.convert.pretrained.from_transformer import from_transformer
    from tokenformer.growth.grow import grow
    from tokenformer.growth.grown_optimizer import grow_optimizer
    from tokenformer.growth.tokens.join import join_modalities
    from tokenformer.growth.tokens.merge import merge
    from tokenformer.growth.tokens.prefix import set_active_share, take_prefix
    from tokenformer.growth.tokens.prune import prune
    from tokenformer.growth.tokens.sparsify import sparsify
    from tokenformer.growth.tokens.upcycle import upcycle
    from tokenformer.layers import (
        Pattention,
        TokenformerDecoderLayer,
        TokenformerEncoderLayer,
    )
    from tokenformer.models.configuration import (
        TokenformerConfig,
        TokenformerVisionConfig,
        TransformerConfig,
        TransformerVisionConfig,
    )
    from tokenformer.models.image_processing import TokenformerImageProcessor
    from tokenformer.models.image_text import TokenformerForImageTextToText
    from tokenformer.models.image_text_configuration import TokenformerImageTextConfig
    from tokenformer.models.image_text_processing import TokenformerProcessor
    from tokenformer.models.language import (
        TokenformerForCausalLM,
        TokenformerModel,
        TransformerForCausalLM,
        TransformerModel,
    )
    from tokenformer.models.quantization import TokenQuantization
    from tokenformer.models.vision import (
        TokenformerForImageClassification,
        TransformerForImageClassification,
    )
    from tokenformer.ops import pattention

__version__ = "0.1.0"

_MODULES = {
    "pattention": "tokenformer.ops",
    "Pattention": "tokenformer.layers",
    "TokenformerEncoderLayer": "tokenformer.layers",
    "TokenformerDecoderLayer": "tokenformer.layers",
    "TokenformerConfig": "tokenformer.models.configuration",
    "TokenformerModel": "tokenformer.models.language",
    "TokenformerForCausalLM": "tokenformer.models.language",
    "TransformerConfig": "tokenformer.models.configuration",
    "TransformerModel": "tokenformer.models.language",
    "TransformerForCausalLM": "tokenformer.models.language",
    "TokenformerVisionConfig": "tokenformer.models.configuration",
    "TokenformerForImageClassification": "tokenformer.models.vision",
    "TransformerVisionConfig": "tokenformer.models.configuration",
    "TransformerForImageClassification": "tokenformer.models.vision",
    "TokenformerImageProcessor": "tokenformer.models.image_processing",
    "TokenformerImageTextConfig": "tokenformer.models.image_text_configuration",
    "TokenformerForImageTextToText": "tokenformer.models.image_text",
    "TokenformerProcessor": "tokenformer.models.image_text_processing",
    "TokenAdapterConfig": "tokenformer.adapters",
    "TokenQuantization": "tokenformer.models.quantization",
    "from_transformer": "tokenformer.convert.pretrained.from_transformer",
    "grow": "tokenformer.growth.grow",
    "grow_optimizer": "tokenformer.growth.grown_optimizer",
    "prune": "tokenformer.growth.tokens.prune",
    "sparsify": "tokenformer.growth.tokens.sparsify",
    "upcycle": "tokenformer.growth.tokens.upcycle",
    "merge": "tokenformer.growth.tokens.merge",
    "join_modalities": "tokenformer.growth.tokens.join",
    "take_prefix": "tokenformer.growth.tokens.prefix",
    "set_active_share": "tokenformer.growth.tokens.prefix",
}

__all__ = [
    "Pattention",
    "TokenAdapterConfig",
    "TokenQuantization",
    "TokenformerConfig",
    "TokenformerDecoderLayer",
    "TokenformerEncoderLayer",
    "TokenformerForCausalLM",
    "TokenformerForImageClassification",
    "TokenformerForImageTextToText",
    "TokenformerImageProcessor",
    "TokenformerImageTextConfig",
    "TokenformerModel",
    "TokenformerProcessor",
    "TokenformerVisionConfig",
    "TransformerConfig",
    "TransformerForCausalLM",
    "TransformerForImageClassification",
    "TransformerModel",
    "TransformerVisionConfig",
    "from_transformer",
    "grow",
    "grow_optimizer",
    "join_modalities",
    "merge",
    "pattention",
    "prune",
    "set_active_share",
    "sparsify",
    "take_prefix",
    "upcycle",
]


_FOLDERS = ("interpret",)
"""Parts of the package with a public interface of their own: `tokenformer.interpret.score_maps`."""


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return importlib.import_module(f"tokenformer.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'tokenformer' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


register_when_imported()
