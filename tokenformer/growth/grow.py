"""One function to grow any model of ours: a TokenFormer by its tokens, a Transformer by a rival.

grown, report = tokenformer.grow(model, to="354m")
"""

from typing import Any

from tokenformer.growth import tokens
from tokenformer.growth.report import GrowthReport
from tokenformer.growth.transformer import METHODS, grow_transformer
from tokenformer.models.configuration import TransformerConfig
from tokenformer.models.projection_configuration import MatrixConfig, TokenConfig

TOKENS = "tokens"


def grow(
    model: Any,
    to: str | TokenConfig | TransformerConfig | None = None,
    *,
    method: str | None = None,
    **options: Any,
) -> tuple[Any, GrowthReport]:
    """A larger model that begins with what `model` knows, and a report. `model` is left alone.

    Args:
        model: a TokenFormer or a Transformer, grown before or not.
        to: a preset or a configuration; or sizes are named among the options.
        method: None or `tokens` for a TokenFormer, see `growth/tokens.py`; for a Transformer one of
            the table in `growth/transformer.py`, by default `net2net`.
        **options: those of `tokens.grow` or `grow_transformer`.
    """
    if hasattr(model, "peft_config"):
        raise TypeError("the model wears an adapter; merge it first, by model.merge_and_unload()")
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
    return tokens.grow(model, to, **options)
