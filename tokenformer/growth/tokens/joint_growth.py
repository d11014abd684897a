"""Growing a vision-language model by new tokens, which belong to neither of its halves.

    grown, report = tokenformer.grow(joint, new_tokens=128)

New tokens have zero keys and leave the scales, so the function does not change. They follow the new
tokens that are there, before the language tokens.
"""

from typing import Any

import torch

from tokenformer.growth.growth_report import GrowthReport
from tokenformer.growth.model_from_tensors import ModelT
from tokenformer.growth.parameter_mapping import NEW
from tokenformer.growth.tokens.rewrite import TokenRewrite
from tokenformer.growth.tokens.token_counts import LayerProjection
from tokenformer.growth.tokens.token_set import Replacement, TokenSet, token_layers
from tokenformer.models.seeds import named_seed


@torch.no_grad()
def grow_new_tokens(
    model: ModelT,
    to: Any = None,
    *,
    new_tokens: int | None = None,
    init: str = "zero",
    scale: str | None = None,
    seed: int = 0,
    old_rate: float | None = None,
    **others: Any,
) -> tuple[ModelT, GrowthReport]:
    """Return a copy of a joint model with `new_tokens` new tokens in every layer, and a report.

    Args:
        model: a joint model of mode `routed` or `shared`; it is not changed.
        new_tokens: the number after growth, in every layer.
        seed: seed of the values.
        old_rate: factor on the learning rate of the existing tokens; 0 freezes them.
        to, init, scale, **others: refused, unless they are the defaults.
    """
    config = model.config
    if not config.is_joined:
        raise ValueError(
            "mode='projector': this model has no tokens for alignment to grow; grow its language "
            "model, then join them again"
        )
    named = {"to": to, **others}
    if wrong := [name for name, value in named.items() if value is not None]:
        raise ValueError(
            f"a vision-language model grows by new_tokens only, not by {', '.join(wrong)}"
        )
    if new_tokens is None:
        raise ValueError("give the number of new tokens after growth, such as new_tokens=128")
    if init != "zero" or scale not in (None, "frozen"):
        raise ValueError(
            f"init={init!r}, scale={scale!r}: new tokens of a vision-language model start with "
            "zero keys at a frozen scale; leave both out"
        )

    def replace(name: str, place: LayerProjection, before: TokenSet) -> Replacement:
        vision, new, _ = config.parts(*place)
        if new_tokens < new:
            raise ValueError(
                f"{name} has {new} new tokens, more than new_tokens={new_tokens}; growth cannot "
                "remove tokens"
            )
        added, end = new_tokens - new, vision + new
        generator = torch.Generator().manual_seed(named_seed(seed, f"{name} {new}"))
        values = torch.empty(added, before.values.shape[1])
        values.normal_(std=model.token_stds(layers[name][1])[1], generator=generator)
        rows = [torch.arange(end), torch.full((added,), NEW), torch.arange(end, before.size)]
        tokens = TokenSet(
            torch.cat([before.keys[:end], before.keys.new_zeros(added, before.keys.shape[1]),
                       before.keys[end:]]),
            torch.cat([before.values[:end], values.to(before.values), before.values[end:]]),
            before.scale,
        )  # fmt: skip
        return Replacement(tokens, torch.cat(rows))

    layers = token_layers(model)
    rewrite = TokenRewrite(
        layers, config, replace, learned_scale=False, old_rate=old_rate, seed=seed, live_scale=True
    )
    return rewrite.apply(model, method="tokens", init="zero", scale="frozen", exact=True)
