"""A model whose layers' token sets are replaced: what dropping, joining and cutting tokens share.

They differ in which tokens a layer ends up with and at which scale. The rest is here: the smaller
or larger configuration, the tensors that stay, and the report with the origin of every row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenformer.growth.assembly import assemble
from tokenformer.growth.origin import NEW, Origin
from tokenformer.growth.plan import check_numbers, grown_config
from tokenformer.growth.probe import layer_change, output_change
from tokenformer.growth.report import GrowthReport, Part
from tokenformer.growth.tokens import TokenSet, layers_of
from tokenformer.layers.pattention import Pattention
from tokenformer.models.accounting import count_parameters
from tokenformer.models.projection_configuration import TokenConfig


@dataclass(frozen=True)
class Replacement:
    """A layer's new tokens, and which old row each is; NEW for none."""

    tokens: TokenSet
    rows: Tensor  # [n']
    value_scale: float | Tensor = 1.0
    """What the old values were multiplied by: one number, or one a row [n', 1]."""
    new_rates: list[float] | None = None
    """Factors on the learning rate of the new rows, in their order; by default 1."""

    def rates(self, before: list[float] | None) -> list[float]:
        """Of every row, from those of the old ones."""
        fresh = iter(self.new_rates or [])
        return [
            next(fresh, 1.0) if row == NEW else (1.0 if before is None else before[row])
            for row in self.rows.tolist()
        ]


def check_tokenformer(model: Any, verb: str) -> None:
    if not isinstance(getattr(model, "config", None), TokenConfig):
        raise TypeError(f"a TokenFormer's tokens {verb}, not a {type(model).__name__}'s")
    check_numbers(model.config)


def token_set(module: Pattention, device: torch.device | None = None) -> TokenSet:
    """All tokens of a layer, active or not, and its scale as it stands."""
    keys, values = module.key_tokens.detach(), module.value_tokens.detach()
    return TokenSet(keys.to(device), values.to(device), float(module.scale_tokens))


@torch.no_grad()
def replace_tokens(
    model: Any,
    replacements: Mapping[str, Replacement],
    *,
    method: str,
    scale: str,
    exact: bool | None,
    learned_scale: bool | None = None,
    others: Callable[[str, Tensor], tuple[Tensor, Origin]] | None = None,
) -> tuple[Any, GrowthReport]:
    """`model` with other tokens in every layer, and the report; `model` itself is left alone.

    Args:
        replacements: by the names of the Pattention layers.
        method, scale, exact: as the report says it.
        learned_scale: by default as in `model`.
        others: makes the tensors that are no tokens from the old ones; by default copies.
    """
    config, layers = model.config, layers_of(model)
    learned = config.learned_scale if learned_scale is None else learned_scale
    copied = others or (lambda name, tensor: (tensor.clone(), Origin(name)))
    made: dict[str, Tensor] = {}
    origins: dict[str, Origin] = {}
    for name, tensor in model.state_dict().items():
        if name.rpartition(".")[0] not in layers:
            made[name], origins[name] = copied(name, tensor)
    parts, sizes, scales, rates = [], {}, {}, {}
    for name, (place, module) in layers.items():
        before, new = token_set(module), replacements[name]
        after = new.tokens
        sizes[place], scales[place] = after.size, after.scale
        rates[place] = new.rates(config.row_rates(*place))
        keys, values = f"{name}.key_tokens", f"{name}.value_tokens"
        made |= {keys: after.keys, values: after.values}
        # A value that was multiplied passes on as much less of the gradient to its key.
        origins[keys] = Origin(keys, new.rows, gradient_scale=new.value_scale)
        origins[values] = Origin(values, new.rows, scale=new.value_scale)
        if learned:
            own = f"{name}.scale_tokens"
            made[own] = after.keys.new_tensor([after.scale])
            origins[own] = Origin(own if config.learned_scale else None)
        change = layer_change(module, (before.keys, before.values, before.scale),
                              (after.keys, after.values, after.scale), seed=0)  # fmt: skip
        parts.append(Part(name, (before.size,), (after.size,), before.scale, after.scale, change))
    new_config = grown_config(config, sizes, scales, learned_scale=learned, rates=rates)
    changed = assemble(type(model), new_config, made)
    changed.train(model.training)
    report = GrowthReport(
        method=method,
        init=None,
        scale=scale,
        exact=exact,
        seed=0,
        parts=parts,
        parameters_before=sum(count_parameters(config).values()),
        parameters_after=sum(count_parameters(new_config).values()),
        origins=origins,
    )
    report.pair(model, changed)
    report.max_output_change = output_change(model, changed, seed=0)
    return changed, report
