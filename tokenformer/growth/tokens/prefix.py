"""The first tokens of every layer as a smaller model.

    set_active_share(model, 0.5)                    # the same model, half of its tokens at work
    smaller, report = take_prefix(model, 0.5)       # that half as a model of its own: equal

The first ceil(share n) tokens of a layer take part, with the same share of its scale (see
`Pattention.token_set`). Any model can be cut so; one trained with nested dropout
(`tokenformer.train.nested_dropout`) has its prefixes trained.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tokenformer.growth.growth_report import GrowthReport
from tokenformer.growth.tokens.rewrite import replace_tokens
from tokenformer.growth.tokens.token_counts import check_not_quantized, share_of
from tokenformer.growth.tokens.token_set import (
    Replacement,
    TokenSet,
    check_tokenformer,
    token_layers,
)
from tokenformer.layers.pattention import Pattention


def set_active_share(model: Any, share: float | None) -> None:
    """Let the first ceil(share n) tokens of every Pattention layer take part; None for all."""
    check_not_quantized(getattr(model, "config", None))
    for module in model.modules():
        if isinstance(module, Pattention):
            whole = module.num_tokens
            module.active_tokens = None if share is None else share_of(whole, share)


@contextmanager
def active_share(model: Any, share: float | None) -> Iterator[None]:
    """The same for the length of a block; then each layer is as it was."""
    layers = [module for module in model.modules() if isinstance(module, Pattention)]
    before = [layer.active_tokens for layer in layers]
    try:
        set_active_share(model, share)
        yield
    finally:
        for layer, count in zip(layers, before, strict=True):
            layer.active_tokens = count


@torch.no_grad()
def take_prefix(model: Any, share: float) -> tuple[Any, GrowthReport]:
    """The first ceil(share n) tokens of every layer as a model of its own, and a report.

    It computes what `model` does after `set_active_share(model, share)`.
    """
    check_tokenformer(model, "can be cut")
    replacements = {}
    with active_share(model, share):
        for name, (_, module) in token_layers(model).items():
            keys, values, scale = module.token_set()
            tokens = TokenSet(keys.clone(), values.clone(), float(scale))
            replacements[name] = Replacement(tokens, torch.arange(tokens.size))
    with active_share(model, None):  # the report compares with the whole model
        return replace_tokens(
            model, replacements, method="prefix", scale="proportional", exact=share == 1
        )
