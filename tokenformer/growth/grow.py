"""`tokenformer.grow`: a TokenFormer grows by its tokens, a Transformer by one of the baselines.

grown, report = tokenformer.grow(model, to="354m")
"""

from typing import Any

from tokenformer.growth.growth_report import GrowthReport
from tokenformer.growth.tokens.growth import grow_tokens
from tokenformer.growth.transformer.methods import METHODS, grow_transformer
from tokenformer.models.configuration import MatrixConfig, TokenConfig, TransformerConfig

TOKENS = "tokens"


def grow(
    model: Any,
    to: str | TokenConfig | TransformerConfig | None = None,
    *,
    method: str | None = None,
    **options: Any,
) -> tuple[Any, GrowthReport]:
    """A larger model that starts from `model`, and a report. `model` itself is not changed.

    Args:
        model: a TokenFormer or a Transformer, grown before or not.
        to: a preset or a configuration; or sizes are named among the options.
        method: None or `tokens` for a TokenFormer, see `growth/tokens/growth.py`; for a Transformer
            one of `growth/transformer/methods.py`, by default `net2net`.
        **options: those of `grow_tokens` or `grow_transformer`.
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
    return grow_tokens(model, to, **options)
