"""Replacing the tokens of every layer: shared by growing, pruning, merging and taking a prefix.

These choose the new tokens and scales of each layer. The rewrite makes the configuration, copies
the other tensors, and reports which old row each new row comes from. Tensors are read one layer at
a time, so the old model may be in memory or on disk.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from tokenformer.growth.growth_report import ChangedPart, GrowthReport
from tokenformer.growth.model_from_tensors import ModelT, build_model
from tokenformer.growth.parameter_mapping import ParameterMapping
from tokenformer.growth.probe import layer_change, output_change
from tokenformer.growth.tokens.token_counts import LayerProjection, TokenCounts, config_with_tokens
from tokenformer.growth.tokens.token_set import Replacement, TokenSet, token_layers
from tokenformer.layers.pattention import Pattention
from tokenformer.layers.routed_pattention import RoutedPattention
from tokenformer.models.accounting import count_parameters
from tokenformer.models.configuration import TokenConfig

T = TypeVar("T")
U = TypeVar("U")
Replace = Callable[[str, LayerProjection, TokenSet], Replacement]
"""(layer name, projection and layer number, old tokens) -> new tokens."""
CopyTensor = Callable[[str, Tensor], tuple[Tensor, ParameterMapping]]
"""Makes the new tensor, for tensors other than tokens."""


def copy_tensor(name: str, tensor: Tensor) -> tuple[Tensor, ParameterMapping]:
    return tensor.clone(), ParameterMapping(name)


def map_in_threads(function: Callable[[T], U], items: Iterable[T]) -> Generator[U, None, None]:
    """Yield `function(item)` for every item in order, computed ahead by as many threads as torch
    uses, with one result per thread waiting at most.

    In each thread torch uses no further ones, so results do not depend on their number.
    """
    count = torch.get_num_threads()
    waiting: deque[Future[U]] = deque()
    with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        try:
            for item in items:
                waiting.append(threads.submit(function, item))
                if len(waiting) > count:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
            torch.set_num_threads(count)  # of threads that start later; this one has kept it


class TokenRewrite:
    """A rewrite of one model. Call `tensors`, then `build` and `report`; or `apply` for all."""

    def __init__(
        self,
        layers: Mapping[str, tuple[LayerProjection, Pattention]],
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
        """Whether the old scale is read from the layer in memory, where training may have changed
        it, instead of the configuration."""
        self.sizes: TokenCounts = {}
        self.scales: dict[LayerProjection, float] = {}
        self.rates: dict[LayerProjection, list[float]] = {}
        self.ages: dict[LayerProjection, list[int]] = {}
        self.active_groups: dict[LayerProjection, int] = {}
        self.parts: list[ChangedPart] = []
        self.mappings: dict[str, ParameterMapping] = {}

    @property
    def config(self) -> TokenConfig:
        """The configuration of the new model; call `tensors` first."""
        return config_with_tokens(
            self.before,
            self.sizes,
            self.scales,
            learned_scale=self.learned,
            rates=self.rates,
            ages=self.ages,
            active_groups=self.active_groups,
        )

    def tensors(
        self, read: Callable[[str], Tensor], names: Iterable[str]
    ) -> Generator[tuple[str, Tensor], None, None]:
        """Yield the tensors of the new model. `read(name)` returns a tensor of the old one, whose
        tensors are `names`. The layers are made in parallel, ahead of their turn."""
        owners = {name: name.rpartition(".")[0] for name in names}
        layers = list(dict.fromkeys(layer for layer in owners.values() if layer in self.layers))
        rewritten = map_in_threads(partial(self.rewrite_layer, read), layers)
        pending = set(layers)
        with closing(rewritten):
            for name, layer in owners.items():
                if layer not in self.layers or name == f"{layer}.bias":  # of a routed layer
                    tensor, self.mappings[name] = self.copy(name, read(name))
                    yield name, tensor
                elif layer in pending:
                    pending.remove(layer)
                    yield from self.record(layer, *next(rewritten)).items()

    @torch.no_grad()  # also in the threads, where it is not inherited
    def rewrite_layer(
        self, read: Callable[[str], Tensor], layer: str
    ) -> tuple[TokenSet, Replacement, float | None]:
        """Return the old tokens of a layer, the new ones, and the change of its output; None for a
        routed layer, whose output depends on its router too."""
        projection, module = self.layers[layer]
        if self.live_scale:
            scale = TokenSet.of(module).scale
        elif self.before.learned_scale:
            scale = read(f"{layer}.scale_tokens").item()
        else:
            scale = self.before.scale(*projection)
        before = TokenSet(read(f"{layer}.key_tokens"), read(f"{layer}.value_tokens"), scale)
        new = self.replace(layer, projection, before)
        if isinstance(module, RoutedPattention):
            return before, new, None
        old, new_tokens = ((t.keys, t.values, t.scale) for t in (before, new.tokens))
        return before, new, layer_change(module, old, new_tokens, self.seed)

    def record(
        self, layer: str, before: TokenSet, new: Replacement, change: float | None
    ) -> dict[str, Tensor]:
        """Add a layer to the configuration and the report, and return its tensors by name."""
        projection, after = self.layers[layer][0], new.tokens
        self.sizes[projection], self.scales[projection] = after.size, after.scale
        rates = self.before.row_rates(*projection)
        if self.old_rate is not None:
            rates = [self.old_rate] * before.size
        self.rates[projection] = new.rates(rates)
        self.ages[projection] = new.ages(self.before.ages(*projection), self.before.growths + 1)
        if new.active_groups is not None:
            self.active_groups[projection] = new.active_groups
        self.mappings |= new.mappings(layer)
        self.parts.append(
            ChangedPart(layer, (before.size,), (after.size,), before.scale, after.scale, change)
        )
        made = {f"{layer}.key_tokens": after.keys, f"{layer}.value_tokens": after.values}
        if self.learned:
            name = f"{layer}.scale_tokens"
            made[name] = after.keys.new_tensor([after.scale])
            self.mappings[name] = ParameterMapping(name if self.before.learned_scale else None)
        return made

    def build(self, model_class: type[ModelT], tensors: dict[str, Tensor]) -> ModelT:
        """Return the new model, which holds `tensors` without copying them."""
        return build_model(model_class, self.config, tensors)

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
            mappings=self.mappings,
        )

    def apply(self, model: ModelT, **report_fields: Any) -> tuple[ModelT, GrowthReport]:
        """Return the rewritten copy of a model in memory, and `report(**report_fields)`."""
        state = model.state_dict()
        changed = self.build(type(model), dict(self.tensors(state.__getitem__, state)))
        changed.train(model.training)
        report = self.report(**report_fields)
        report.pair(model, changed)
        report.max_output_change = output_change(model, changed, self.seed)
        return changed, report


@torch.no_grad()
def replace_tokens(
    model: ModelT,
    replacements: Mapping[str, Replacement],
    *,
    method: str,
    scale: str,
    exact: bool | None,
    learned_scale: bool | None = None,
    copy: CopyTensor = copy_tensor,
) -> tuple[ModelT, GrowthReport]:
    """Return a copy of `model` with new tokens in every Pattention layer, and a report.

    Args:
        replacements: new tokens by layer name.
        method, scale, exact: fields of the report.
        learned_scale: whether scales are trained; by default as in `model`.
        copy: makes the tensors other than tokens from the old ones.
    """
    config = model.config
    rewrite = TokenRewrite(
        token_layers(model),
        config,
        lambda layer, projection, before: replacements[layer],
        learned_scale=config.learned_scale if learned_scale is None else learned_scale,
        copy=copy,
        live_scale=True,
    )
    return rewrite.apply(model, method=method, scale=scale, exact=exact)
