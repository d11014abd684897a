"""Sparse upcycling: a trained dense TokenFormer to one with more tokens that is no slower.

    sparse, report = tokenformer.upcycle(model, copies=4, group_size=32)

The tokens of every chosen layer are repeated, and a row visits as many as before: a router chooses
the groups (Komatsuzaki et al., arXiv 2212.05055). All groups of one copy start with the same router
weights, so that at first a row chooses all groups of one copy, which are the whole old layer
("virtual groups", He et al., arXiv 2410.07524). Training then makes the copies different, and rows
combine groups of several.

Scores start small, so all gates are close to 1. Their mean is divided out of the values, which
leaves the output as it was within about the spread of the gates.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenformer.growth.growth_report import GrowthReport
from tokenformer.growth.model_from_tensors import ModelT
from tokenformer.growth.parameter_mapping import ParameterMapping
from tokenformer.growth.tokens.rewrite import TokenRewrite
from tokenformer.growth.tokens.token_counts import LayerProjection, check_projections
from tokenformer.growth.tokens.token_set import (
    Replacement,
    TokenSet,
    check_tokenformer,
    check_whole,
    token_layers,
)
from tokenformer.models.configuration import TokenConfig
from tokenformer.models.seeds import named_seed

SPREAD = 0.1
"""Standard deviation of the scores at the start."""
SAMPLES = 1 << 16


def upcycle(
    model: ModelT,
    copies: int = 4,
    group_size: int = 32,
    *,
    projections: Sequence[str] = ("ffn",),
    theta_norm: str | None = None,
    balance_rate: float = 0.01,
    seed: int = 0,
) -> tuple[ModelT, GrowthReport]:
    """Return a routed model with `copies` times the tokens, of which a row visits as many as
    before, and a report.

    Args:
        model: a TokenFormer without routing; it is not changed.
        copies: how many times the tokens are repeated.
        group_size: tokens per group; it must divide the token counts.
        projections: the projections to upcycle: any of q, k, v, o, ffn.
        theta_norm: which scores the norm counts; by default as `theta` needs it.
        balance_rate: step of the load balancing.
        seed: of the router weights.
    """
    check_tokenformer(model, "can be upcycled")
    check_whole(model)
    if copies < 2:
        raise ValueError(f"copies={copies} must be at least 2")
    if group_size < 1:
        raise ValueError(f"group_size={group_size} must be at least 1")
    check_projections(projections)
    for (projection, number), layer in token_layers(model).values():
        if projection in projections and layer.num_tokens % group_size:
            raise ValueError(
                f"group_size={group_size} must divide the {layer.num_tokens} tokens of "
                f"{projection} of layer {number}"
            )
    options = {"group_size": group_size, "router": "gated", "balance_rate": balance_rate}
    if theta_norm is not None:
        options["theta_norm"] = theta_norm
    rewrite = Upcycling(model, copies, options, projections, seed)
    return rewrite.apply(model, method="upcycle", scale="frozen")


class Upcycling(TokenRewrite):
    def __init__(
        self,
        model: ModelT,
        copies: int,
        options: dict[str, Any],
        projections: Sequence[str],
        seed: int,
    ) -> None:
        self.copies, self.options, self.projections = copies, options, projections
        self.group_size: int = options["group_size"]
        self.gate = mean_gate(copies)
        super().__init__(
            token_layers(model),
            model.config,
            self.repeat,
            learned_scale=model.config.learned_scale,
            seed=seed,
            live_scale=True,
        )

    @property
    def config(self) -> TokenConfig:
        layers = range(self.before.num_hidden_layers)
        groups = {
            name: [self.before.tokens(name, layer) // self.group_size for layer in layers]
            for name in self.projections
        }
        routing = {"active_groups": groups, **self.options}
        return type(self.before).from_dict(super().config.to_dict() | routing)

    def repeat(self, layer: str, projection: LayerProjection, before: TokenSet) -> Replacement:
        rows = torch.arange(before.size)
        if projection[0] not in self.projections:
            return Replacement(before, rows)
        tokens = TokenSet(
            before.keys.repeat(self.copies, 1),
            before.values.repeat(self.copies, 1) / self.gate,
            before.scale * self.copies,
        )
        return Replacement(tokens, rows.repeat(self.copies), value_scale=1 / self.gate)

    def rewrite_layer(
        self, read: Callable[[str], Tensor], layer: str
    ) -> tuple[TokenSet, Replacement, float | None]:
        before, new, change = super().rewrite_layer(read, layer)
        return before, new, None if new.tokens.size > before.size else change

    def tensors(
        self, read: Callable[[str], Tensor], names: Iterable[str]
    ) -> Generator[tuple[str, Tensor], None, None]:
        yield from super().tensors(read, names)
        for layer, (place, module) in self.layers.items():
            if place[0] in self.projections:
                weight, like = f"{layer}.router.weight", module.key_tokens
                generator = torch.Generator().manual_seed(named_seed(self.seed, weight))
                rows = torch.randn(self.copies, module.in_features, generator=generator)
                groups = module.num_tokens // self.group_size
                rows = SPREAD * module.in_features**-0.5 * rows.repeat_interleave(groups, 0)
                self.mappings[weight] = ParameterMapping(None)
                yield weight, rows.to(like)
                yield f"{layer}.router.bias", torch.zeros(len(rows), device=like.device)


def mean_gate(copies: int) -> float:
    """Return the mean of the gate of the copy with the largest score, for normal scores."""
    samples = torch.randn(SAMPLES, copies, generator=torch.Generator().manual_seed(0))
    return (2 * (SPREAD * samples.amax(1)).sigmoid()).mean().item()
