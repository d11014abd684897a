"""A copy of a model in which every layer has other tokens: shared by growing, pruning, merging and
taking a prefix.

They differ in which tokens a layer ends up with and at which scale. The new configuration, the
tensors that stay, and the report with the origin of every row are made here. Tensors are read one
layer at a time, so the old model may be in memory or on disk.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tokenformer.growth.assembly import assemble
from tokenformer.growth.growth_report import GrowthReport, Part
from tokenformer.growth.origin import Origin
from tokenformer.growth.probe import layer_change, output_change
from tokenformer.growth.tokens.token_counts import Place, Sizes, config_with_tokens
from tokenformer.growth.tokens.token_set import Replacement, TokenSet, token_layers
from tokenformer.layers.pattention import Pattention
from tokenformer.models.accounting import count_parameters
from tokenformer.models.configuration import TokenConfig

Replace = Callable[[str, Place, TokenSet], Replacement]
"""(name of the layer, its place, its tokens) -> its new tokens."""
CopyTensor = Callable[[str, Tensor], tuple[Tensor, Origin]]
"""Makes a tensor that is not a token from the old one."""


def copy_tensor(name: str, tensor: Tensor) -> tuple[Tensor, Origin]:
    return tensor.clone(), Origin(name)


class TokenRewrite:
    """One rewrite, tensor by tensor: `tensors`, then `build` and `report`."""

    def __init__(
        self,
        layers: Mapping[str, tuple[Place, Pattention]],
        config: TokenConfig,
        replace: Replace,
        *,
        learned_scale: bool,
        copy: CopyTensor = copy_tensor,
        old_rate: float | None = None,
        seed: int = 0,
        live_scale: bool = False,
    ) -> None:
        self.layers, self.before, self.replace = layers, config, replace
        self.learned, self.copy, self.old_rate, self.seed = learned_scale, copy, old_rate, seed
        self.live_scale = live_scale
        """Whether the old scale is that of the layer in memory, which training may have moved,
        rather than that of the configuration."""
        self.sizes: Sizes = {}
        self.scales: dict[Place, float] = {}
        self.rates: dict[Place, list[float]] = {}
        self.parts: list[Part] = []
        self.origins: dict[str, Origin] = {}

    @property
    def config(self) -> TokenConfig:
        """The new model's, once `tensors` has run."""
        return config_with_tokens(
            self.before, self.sizes, self.scales, learned_scale=self.learned, rates=self.rates
        )

    def tensors(self, read: Callable[[str], Tensor], names: list[str]) -> dict[str, Tensor]:
        """The new model's tensors; `read` is asked for one of the old model's at a time."""
        made: dict[str, Tensor] = {}
        for name in names:
            layer, _, kind = name.rpartition(".")
            if layer not in self.layers:
                made[name], self.origins[name] = self.copy(name, read(name))
            elif kind == "key_tokens":
                made |= self.rewrite_layer(layer, read)
        return made

    def rewrite_layer(self, layer: str, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        place, module = self.layers[layer]
        scale_name = f"{layer}.scale_tokens"
        learned_before = self.before.learned_scale
        if self.live_scale:
            scale = TokenSet.of(module).scale
        else:
            scale = read(scale_name).item() if learned_before else self.before.scale(*place)
        before = TokenSet(read(f"{layer}.key_tokens"), read(f"{layer}.value_tokens"), scale)
        new = self.replace(layer, place, before)
        after = new.tokens
        self.sizes[place], self.scales[place] = after.size, after.scale
        rates = self.before.row_rates(*place)
        if self.old_rate is not None:
            rates = [self.old_rate] * before.size
        self.rates[place] = new.rates(rates)
        self.origins |= new.origins(layer)
        change = layer_change(module, (before.keys, before.values, before.scale),
                              (after.keys, after.values, after.scale), self.seed)  # fmt: skip
        self.parts.append(
            Part(layer, (before.size,), (after.size,), before.scale, after.scale, change)
        )
        made = {f"{layer}.key_tokens": after.keys, f"{layer}.value_tokens": after.values}
        if self.learned:
            made[scale_name] = after.keys.new_tensor([after.scale])
            self.origins[scale_name] = Origin(scale_name if learned_before else None)
        return made

    def build(self, model_class: Any, tensors: dict[str, Tensor]) -> Any:
        """The new model, of these very tensors."""
        return assemble(model_class, self.config, tensors)

    def report(
        self, *, method: str, scale: str, init: str | None = None, exact: bool | None = None
    ) -> GrowthReport:
        return GrowthReport(
            method=method,
            init=init,
            scale=scale,
            seed=self.seed,
            exact=exact,
            parts=self.parts,
            parameters_before=sum(count_parameters(self.before).values()),
            parameters_after=sum(count_parameters(self.config).values()),
            origins=self.origins,
        )

    def apply(self, model: Any, **about: Any) -> tuple[Any, GrowthReport]:
        """The rewritten copy of a model in memory, and its `report(**about)`."""
        state = model.state_dict()
        changed = self.build(type(model), self.tensors(state.__getitem__, list(state)))
        changed.train(model.training)
        report = self.report(**about)
        report.pair(model, changed)
        report.max_output_change = output_change(model, changed, self.seed)
        return changed, report


@torch.no_grad()
def replace_tokens(
    model: Any,
    replacements: Mapping[str, Replacement],
    *,
    method: str,
    scale: str,
    exact: bool | None,
    learned_scale: bool | None = None,
    copy: CopyTensor = copy_tensor,
) -> tuple[Any, GrowthReport]:
    """A copy of `model` with these tokens, by the names of its Pattention layers, and the report.

    Args:
        method, scale, exact: as the report states them.
        learned_scale: by default as in `model`.
        copy: makes the tensors that are not tokens from the old ones.
    """
    config = model.config
    rewrite = TokenRewrite(
        token_layers(model),
        config,
        lambda layer, place, before: replacements[layer],
        learned_scale=config.learned_scale if learned_scale is None else learned_scale,
        copy=copy,
        live_scale=True,
    )
    return rewrite.apply(model, method=method, scale=scale, exact=exact)
