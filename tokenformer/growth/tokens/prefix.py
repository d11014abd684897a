"""The first tokens of every layer as a smaller model.

    set_active_share(model, 0.5)                    # use half of the tokens, in place
    smaller, report = take_prefix(model, 0.5)       # the same half as a new, smaller model

The first ceil(share n) of the n tokens of a layer are used, with the same share of its scale (see
`Pattention.token_set`). Nested dropout (`tokenformer.train.nested_dropout`) trains a model so that
its prefixes work well.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from tokenformer.growth.growth_report import GrowthReport
from tokenformer.growth.model_from_tensors import ModelT
from tokenformer.growth.tokens.rewrite import replace_tokens
from tokenformer.growth.tokens.token_counts import check_not_joint, check_not_quantized, token_share
from tokenformer.growth.tokens.token_set import (
    Replacement,
    TokenSet,
    check_tokenformer,
    token_layers,
)
from tokenformer.layers.pattention import Pattention


def set_active_share(model: nn.Module, share: float | None) -> None:
    """Use the first ceil(share n) tokens of every Pattention layer; None uses all."""
    check_not_quantized(getattr(model, "config", None))
    if share is not None:
        check_not_joint(getattr(model, "config", None))
    for module in model.modules():
        if isinstance(module, Pattention):
            count = None if share is None else token_share(module.num_tokens, share)
            module.active_tokens = count


@contextmanager
def active_share(model: nn.Module, share: float | None) -> Iterator[None]:
    """`set_active_share` within a `with` block; the previous setting is restored after it."""
    layers = [module for module in model.modules() if isinstance(module, Pattention)]
    before = [layer.active_tokens for layer in layers]
    try:
        set_active_share(model, share)
        yield
    finally:
        for layer, count in zip(layers, before, strict=True):
            layer.active_tokens = count


@torch.no_grad()
def take_prefix(model: ModelT, share: float) -> tuple[ModelT, GrowthReport]:
    """Return a model with the first ceil(share n) tokens of every layer, and a report.

    Its output equals that of `model` after `set_active_share(model, share)`.
    """
    check_tokenformer(model, "can be cut", routed=True)
    if model.config.is_routed:
        raise ValueError(
            f"active_groups={model.config.active_groups}: a routed layer has no prefix, its router "
            "decides which tokens are used; set active_groups of the layers, or drop whole groups "
            "with tokenformer.prune"
        )
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
