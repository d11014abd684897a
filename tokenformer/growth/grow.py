"""`tokenformer.grow`: a TokenFormer grows by adding tokens, a Transformer by a baseline method.

grown, report = tokenformer.grow(model, to="354m")
"""

from typing import Any

from tokenformer.growth.growth_report import GrowthReport
from tokenformer.growth.model_from_tensors import ModelT
from tokenformer.growth.tokens.joint_growth import grow_new_tokens
from tokenformer.growth.tokens.token_growth import grow_tokens
from tokenformer.growth.transformer.methods import METHODS, grow_transformer
from tokenformer.models.configuration import MatrixConfig, TokenConfig, TransformerConfig
from tokenformer.models.image_text_configuration import TokenformerImageTextConfig

TOKENS = "tokens"


def grow(
    model: ModelT,
    to: str | TokenConfig | TransformerConfig | None = None,
    *,
    method: str | None = None,
    **options: Any,
) -> tuple[ModelT, GrowthReport]:
    """Return a larger copy of `model` that keeps what it learned, and a report.

    Args:
        model: a TokenFormer or a Transformer; it is not changed.
        to: a preset name or a configuration. Alternatively, give sizes among the options.
        method: for a TokenFormer None or `tokens`, see `growth/tokens/token_growth.py`; for a
            Transformer one of `growth/transformer/methods.py`, by default `net2net`.
        **options: passed to `grow_tokens` or `grow_transformer`; a vision-language model takes
            `new_tokens`, see `growth/tokens/joint_growth.py`.
    """
    if hasattr(model, "peft_config"):
        raise TypeError(
            "the model has an adapter attached; merge it first: model.merge_and_unload()"
        )
    if isinstance(model.config, MatrixConfig):
        if method == TOKENS:
            raise ValueError(
                "method='tokens': a Transformer has no tokens to grow; "
                f"choose one of {', '.join(METHODS)}"
            )
        return grow_transformer(model, to, method=method or "net2net", **options)
    if method not in (None, TOKENS):
        raise ValueError(
            f"method={method!r}: a TokenFormer grows by its tokens; leave the method out"
        )
    if isinstance(model.config, TokenformerImageTextConfig):
        return grow_new_tokens(model, to, **options)
    return grow_tokens(model, to, **options)
