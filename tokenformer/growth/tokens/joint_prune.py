"""Pruning a vision-language model: every token by the rows that attend to it.

    smaller, report = tokenformer.prune(joint, batches, keep=0.5, parts=("vision", "new"))
    smaller, report = tokenformer.prune(joint)      # drop only tokens with zero keys: exact

A `routed` layer is two overlapping dense ones: vision and new tokens for image rows, language and
new tokens for text rows (`layers/modality_pattention.py`). Each has a scale of its own, which is
corrected for the tokens it loses, and contributions of its own (`prune`); those of a new token are
the mean over the rows of both. Afterwards the values of vision tokens are fitted on image rows,
those of language tokens on text rows. New tokens keep their values, which both modalities use.

In a `shared` layer all rows attend to all tokens: contributions, scale and fit are those of one
dense layer, and every part keeps its share of the tokens.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tokenformer.growth.growth_report import GrowthReport
from tokenformer.growth.model_from_tensors import ModelT
from tokenformer.growth.tokens.refit import ValueFit, memory_groups
from tokenformer.growth.tokens.rewrite import TokenRewrite
from tokenformer.growth.tokens.token_counts import (
    LayerProjection,
    check_not_quantized,
    count_options,
    new_tokens_option,
    rows_by_layer,
    token_share,
)
from tokenformer.growth.tokens.token_set import Replacement, TokenSet, token_layers
from tokenformer.growth.tokens.token_usage import (
    TokenStatistics,
    UsageSums,
    idle_tokens,
    kept_share,
    observe_inputs,
    rows_to_keep,
)
from tokenformer.layers.modality_pattention import ModalityPattention, ModalityRows
from tokenformer.layers.pattention import Pattention
from tokenformer.models.configuration import TokenConfig
from tokenformer.models.image_text_configuration import TokenformerImageTextConfig

VISION, NEW, LANGUAGE = PARTS = ("vision", "new", "language")
IMAGE_ROWS, TEXT_ROWS, ALL_ROWS = "image", "text", "all"
FITTED = {IMAGE_ROWS: (VISION,), TEXT_ROWS: (LANGUAGE,), ALL_ROWS: PARTS}
"""The parts whose values are fitted on a kind of rows."""


@dataclass(frozen=True)
class Use:
    """The tokens of a layer that one kind of rows attends to, as a dense layer."""

    kind: str
    rows: slice
    view: Pattention

    @classmethod
    def of(cls, layer: Pattention, kind: str, rows: slice, scale: Any) -> "Use":
        view = Pattention(
            layer.in_features,
            layer.out_features,
            rows.stop - rows.start,
            theta=layer.theta,
            scale_tokens=float(scale),
            approximate=layer.approximate,
            eps=layer.eps,
            device="meta",
        )
        for name in ("key_tokens", "value_tokens"):
            tokens = getattr(layer, name).detach()[rows]
            setattr(view, name, nn.Parameter(tokens, requires_grad=False))
        return cls(kind, rows, view)

    def choose(self, x: Tensor, rows: ModalityRows | None) -> Tensor:
        """Return the rows of this kind among the inputs of the layer."""
        if self.kind == ALL_ROWS or (rows is None and self.kind == TEXT_ROWS):
            return x
        flat = x.flatten(0, -2)
        if rows is None:
            return flat[:0]
        return flat.index_select(0, rows.image if self.kind == IMAGE_ROWS else rows.text)


def uses_of(layer: Pattention) -> list[Use]:
    if not isinstance(layer, ModalityPattention):
        return [Use.of(layer, ALL_ROWS, slice(0, layer.num_tokens), layer.scale_tokens)]
    stop = layer.vision_tokens + layer.new_tokens
    return [
        Use.of(layer, IMAGE_ROWS, slice(0, stop), layer.vision_scale_tokens),
        Use.of(layer, TEXT_ROWS, slice(layer.vision_tokens, layer.num_tokens), layer.scale_tokens),
    ]


def part_rows(config: TokenformerImageTextConfig, place: LayerProjection) -> dict[str, slice]:
    vision, new, language = config.parts(*place)
    ends = (0, vision, vision + new, vision + new + language)
    return {part: slice(ends[i], ends[i + 1]) for i, part in enumerate(PARTS)}


def prune_joint(
    model: ModelT,
    batches: Iterable[Any] | None = None,
    *,
    keep: float | None = None,
    parts: Sequence[str] | None = None,
    scale: str = "measured",
    refit: bool = True,
) -> tuple[ModelT, GrowthReport]:
    """Return a smaller vision-language model, and a report; the arguments are those of `prune`."""
    config = model.config
    check_not_quantized(config)
    chosen = PARTS if parts is None else tuple(parts)
    if not config.is_joined:
        raise ValueError(
            "mode='projector': this model has one set of tokens, behind a frozen encoder; prune "
            "the language model, then join them again"
        )
    if unknown := set(chosen) - set(PARTS):
        raise ValueError(f"parts={sorted(unknown)} are unknown; choose from {', '.join(PARTS)}")
    layers = token_layers(model)
    idle = {name: idle_tokens(layer) for name, (_, layer) in layers.items()}
    counts = {
        name: counts_to_keep(part_rows(config, place), idle[name], keep, chosen)
        for name, (place, _) in layers.items()
    }
    losing = [
        name
        for name, (place, _) in layers.items()
        for part, rows in part_rows(config, place).items()
        if len(idle[name][rows]) - counts[name][part] > idle[name][rows].sum()
    ]
    losing = list(dict.fromkeys(losing))
    if losing and batches is None:
        raise ValueError(
            f"batches is missing: without data only unused tokens (zero keys) can be removed, and "
            f"{losing[0]} has fewer of them than it should lose"
        )
    batches = list(batches) if losing and batches is not None else []
    uses = {name: uses_of(layer) for name, (_, layer) in layers.items()}
    found = statistics(model, batches, {name: uses[name] for name in losing}, chosen)
    kept = {}
    for name, (place, _) in layers.items():
        worth = contributions(uses[name], found.get(name), len(idle[name]))
        kept[name] = torch.cat(
            [
                rows.start + rows_to_keep(counts[name][part], idle[name][rows], worth[rows])
                for part, rows in part_rows(config, place).items()
            ]
        )
    pruning = JointPruning(model, uses, kept, scale)
    pruning.measure_scales({name: found[name] for name in losing})
    if refit:
        pruning.refit(losing, batches)
    rewrite = pruning.rewrite()
    return rewrite.apply(model, method="prune", scale=scale, exact=not losing)


def counts_to_keep(
    parts: Mapping[str, slice], idle: Tensor, keep: float | None, chosen: Sequence[str]
) -> dict[str, int]:
    """Return how many tokens of each part a layer keeps. It needs one of vision and of language."""
    counts = {}
    for part, rows in parts.items():
        size = rows.stop - rows.start
        if part not in chosen or size == 0:
            counts[part] = size
        elif keep is None:
            counts[part] = max(int(part != NEW), int((~idle[rows]).sum()))
        else:
            counts[part] = token_share(size, keep)
    return counts


def statistics(
    model: Any, batches: list[Any], uses: Mapping[str, list[Use]], chosen: Sequence[str]
) -> dict[str, list[tuple[TokenStatistics, int]]]:
    """Return the statistics of every use of the named layers, and the number of its rows."""
    if not uses:
        return {}
    sums = {name: [UsageSums(use.view) for use in each] for name, each in uses.items()}
    adders = {
        name: dispatch(uses[name], [each.add for each in several]) for name, several in sums.items()
    }
    observe_inputs(model, batches, adders)
    for name, each in uses.items():
        for use, total in zip(each, sums[name], strict=True):
            if not total.rows and set(chosen) & {*FITTED[use.kind], NEW}:
                raise ValueError(
                    f"batches have no rows of {use.kind}: the tokens they use cannot be measured; "
                    "give batches with images and text, or leave out these parts"
                )
    return {
        name: [(each.result(), each.rows) for each in several] for name, several in sums.items()
    }


def dispatch(uses: list[Use], adders: list[Callable[[Tensor], None]]) -> Callable[..., None]:
    """Return an observer of a layer's inputs that passes the rows of every use to its adder."""

    def observe(x: Tensor, rows: ModalityRows | None = None) -> None:
        for use, add in zip(uses, adders, strict=True):
            if len(chosen := use.choose(x, rows)):
                add(chosen)

    return observe


def contributions(
    uses: list[Use], found: list[tuple[TokenStatistics, int]] | None, size: int
) -> Tensor:
    """Return what each token of a layer adds to the output, the mean over the rows of all uses."""
    worth = torch.zeros(size, dtype=torch.float64)
    if found is None:
        return worth
    total = sum(rows for _, rows in found)
    for use, (statistic, rows) in zip(uses, found, strict=True):
        worth[use.rows] += statistic.contribution * rows / max(1, total)
    return worth


class JointPruning:
    """The kept tokens of every layer, with the scales and values that each use gives them."""

    def __init__(
        self, model: Any, uses: Mapping[str, list[Use]], kept: Mapping[str, Tensor], scale: str
    ) -> None:
        self.model, self.uses, self.kept, self.scale = model, uses, kept, scale
        self.layers = token_layers(model)
        self.factors = {name: dict.fromkeys(FITTED, 1.0) for name in self.layers}
        """On the scale of every use, by layer."""
        self.values = {
            name: layer.value_tokens.detach()[kept[name].to(layer.value_tokens.device)]
            for name, (_, layer) in self.layers.items()
        }

    def inside(self, name: str, use: Use) -> Tensor:
        """Return which kept tokens of a layer belong to a use."""
        return (self.kept[name] >= use.rows.start) & (self.kept[name] < use.rows.stop)

    def kept_in(self, name: str, use: Use) -> TokenSet:
        """Return the kept tokens of a use, at its new scale."""
        inside = self.inside(name, use)
        rows = (self.kept[name][inside] - use.rows.start).to(use.view.key_tokens.device)
        scale = float(use.view.scale_tokens) * self.factors[name][use.kind]
        values = self.values[name][inside.to(self.values[name].device)]
        return TokenSet(use.view.key_tokens.detach()[rows], values, scale)

    def measure_scales(self, found: Mapping[str, list[tuple[TokenStatistics, int]]]) -> None:
        if self.scale == "frozen":
            return
        for name, several in found.items():
            for use, (statistic, _) in zip(self.uses[name], several, strict=True):
                rows = self.kept[name][self.inside(name, use)] - use.rows.start
                self.factors[name][use.kind] = kept_share(statistic.share, rows)

    def refit(self, names: list[str], batches: list[Any]) -> None:
        """Fit the values of these layers; frozen tokens keep theirs."""
        sets = {
            (name, number): self.kept_in(name, use)
            for name in names
            for number, use in enumerate(self.uses[name])
        }
        for group in memory_groups(sets):
            fits = {
                (name, number): ValueFit(
                    self.uses[name][number].view, sets[name, number], self.free(name, number)
                )
                for name, number in group
            }
            observers = {
                name: dispatch(
                    [self.uses[name][n] for own, n in group if own == name],
                    [fits[own, n].add for own, n in group if own == name],
                )
                for name in dict.fromkeys(own for own, _ in group)
            }
            observe_inputs(self.model, batches, observers)
            for (name, number), fit in fits.items():
                values = self.values[name]
                free = torch.zeros(len(values), dtype=torch.bool)
                free[self.inside(name, self.uses[name][number])] = fit.free
                values[free.to(values.device)] = fit.values()[fit.free.to(values.device)]

    def free(self, name: str, number: int) -> Tensor:
        """Return which kept tokens of a use are fitted on its rows."""
        use, config = self.uses[name][number], self.model.config
        place = self.layers[name][0]
        fitted = torch.zeros(config.tokens(*place), dtype=torch.bool)
        for part, rows in part_rows(config, place).items():
            fitted[rows] = part in FITTED[use.kind]
        if rates := config.row_rates(*place):
            fitted &= torch.tensor(rates) != 0
        return fitted[self.kept[name][self.inside(name, use)]]

    def rewrite(self) -> "JointRewrite":
        replacements, scales = {}, {}
        for name, (place, layer) in self.layers.items():
            before, rows = TokenSet.of(layer), self.kept[name]
            factors, config = self.factors[name], self.model.config
            text, image = factors[TEXT_ROWS], factors[IMAGE_ROWS]
            if config.mode == "shared":
                text = image = factors[ALL_ROWS]
            scales[place] = (
                config.vision_scale(*place) * image,
                config.language_scale(*place) * text,
            )
            keys = before.keys[rows.to(before.keys.device)]
            tokens = TokenSet(keys, self.values[name], before.scale * text)
            replacements[name] = Replacement(tokens, rows)
        return JointRewrite(self.model, replacements, scales)


class JointRewrite(TokenRewrite):
    """A rewrite in which all parts may have other counts and scales."""

    before: TokenformerImageTextConfig

    def __init__(
        self,
        model: Any,
        replacements: Mapping[str, Replacement],
        scales: Mapping[LayerProjection, tuple[float, float]],
    ) -> None:
        super().__init__(
            token_layers(model),
            model.config,
            lambda name, place, before: replacements[name],
            learned_scale=False,
            live_scale=True,
        )
        self.part_scales = scales
        """Of vision and language, by layer."""
        self.counts = {
            place: {
                part: int(((kept >= rows.start) & (kept < rows.stop)).sum())
                for part, rows in part_rows(model.config, place).items()
            }
            for name, (place, _) in self.layers.items()
            for kept in [replacements[name].rows]
        }

    def rewrite_layer(
        self, read: Callable[[str], Tensor], layer: str
    ) -> tuple[TokenSet, Replacement, float | None]:
        """Without the change of the output, which differs by modality."""
        return *super().rewrite_layer(read, layer)[:2], None

    @property
    def config(self) -> TokenConfig:
        depth = self.before.num_hidden_layers
        sizes = {
            part: {place: counts[part] for place, counts in self.counts.items()} for part in PARTS
        }
        of_vision = {place: scales[0] for place, scales in self.part_scales.items()}
        of_language = {place: scales[1] for place, scales in self.part_scales.items()}
        options = self.before.to_dict()
        options |= count_options(sizes[LANGUAGE], of_language, depth)
        options["vision_config"] |= count_options(sizes[VISION], of_vision, depth)
        options["new_tokens"] = new_tokens_option(sizes[NEW], depth)
        options["token_rates"] = rows_by_layer(self.rates, depth, usual=1)
        options["token_ages"] = rows_by_layer(self.ages, depth, usual=0)
        return type(self.before).from_dict(options)
