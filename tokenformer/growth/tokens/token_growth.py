"""Growing a TokenFormer by adding parameter tokens.

    grown, report = tokenformer.grow(model, to="354m", init="zero")

| init         | new keys                   | new values         | new scale     | output  |
|--------------|----------------------------|--------------------|---------------|---------|
| `zero`       | zero                       | random             | s             | exact   |
| `random`     | random                     | random             | the new count | changes |
| `zero_value` | random, Gram matrix of the | zero               | s n'/n        | exact   |
|              | old keys                   |                    |               |         |
| `clone`      | k copies of the old, the   | old / k plus noise | k s           | exact   |
|              | remainder zero             |                    |               |         |
| `shrink`     | random                     | random; the old    | the new count | changes |
|              |                            | times sqrt(n / n') |               |         |

n and n' are the old and new token counts, s is the old scale.

`zero`: a zero key scores zero on every input, adds nothing to the norm and gets the weight gelu(0)
= 0. `clone`: k copies multiply the norm by sqrt(k), which the scale k s cancels, and each copy gets
1/k of the value. Noise on the copies' values that sums to zero breaks the symmetry. `zero_value`: m
new keys with the Gram matrix m/n K^T K multiply every norm by sqrt(n'/n), which the scale s n'/n
cancels. This is exact for `l2_gelu` if there are at least as many new tokens as the rank of the old
keys, and approximate otherwise. `shrink`: with more tokens each value learns at a lower rate, and
old values, which became large at the higher one, would hardly change any more. Scaled down they
learn with the new ones: the loss rises at growth and ends lower. Compare "shrink and perturb" (Ash
and Adams, 2020).

A routed layer gets new groups and keeps its number of active ones (`router_growth`). No row chooses
a new group at growth, so `zero` and `zero_value` are as exact as above.
"""

import math
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tokenformer.growth.growth_report import GrowthReport
from tokenformer.growth.model_from_tensors import ModelT
from tokenformer.growth.parameter_mapping import NEW, extended_index
from tokenformer.growth.tokens.rewrite import CopyTensor, TokenRewrite, copy_tensor
from tokenformer.growth.tokens.router_growth import RouterGrowth, check_routed_growth
from tokenformer.growth.tokens.token_counts import (
    LayerProjection,
    TokenCounts,
    config_with_tokens,
    target_token_counts,
    token_counts,
)
from tokenformer.growth.tokens.token_set import Replacement, TokenSet, token_layers
from tokenformer.layers.routed_pattention import RoutedPattention
from tokenformer.models.backbone import BlockPreTrainedModel
from tokenformer.models.configuration import TokenConfig, Tokens
from tokenformer.models.seeds import named_seed

SCALE_POLICIES = ("frozen", "current", "anneal", "learned")
RANK_TOLERANCE = 1e-13
"""Eigenvalues of K^T K below this fraction of the largest count as zero (float64)."""
CLONE_NOISE = 0.1
"""Standard deviation of the noise on the copies' values, relative to the values' RMS."""


def grow_tokens(
    model: ModelT,
    to: str | TokenConfig | None = None,
    *,
    init: str = "zero",
    scale: str | None = None,
    seed: int = 0,
    old_rate: float | None = None,
    **tokens: Tokens,
) -> tuple[ModelT, GrowthReport]:
    """Return a larger copy of `model`, and a report.

    Args:
        model: a TokenFormer; it is not changed.
        to: a preset of the same width and depth, or a configuration.
        init: `zero`, `random`, `zero_value`, `clone` or `shrink`; see the table above.
        scale: `frozen` uses the scale of the table; `current` the new token count; `anneal` moves
            from the first to the second during training (`train.scale_anneal`); `learned` starts at
            the first and is trained. The default is `current` for `random` and `shrink`, else
            `frozen`.
        seed: seed of the random initialization.
        old_rate: factor on the learning rate of the existing tokens; 0 freezes them. By default
            their rate does not change.
        **tokens: instead of `to`, any of qkv_tokens, output_tokens, ffn_tokens, q_tokens, k_tokens
            and v_tokens: an int, or one per layer.
    """
    if not isinstance(model.config, TokenConfig):
        raise TypeError(f"only a TokenFormer grows by tokens, not a {type(model).__name__}")
    sizes = target_token_counts(model.config, to, tokens)
    growth = TokenGrowth(
        type(model), model.config, sizes, init=init, scale=scale, seed=seed, old_rate=old_rate
    )
    return growth.apply(model, **growth.report_fields)


Allocate = Callable[[Tensor, int], Tensor]
"""(old rows [n, d], n') -> memory for n' rows on the same device, not initialized."""


def allocate_rows(old: Tensor, size: int) -> Tensor:
    return old.new_empty(size, old.shape[1])


class TokenGrowth(TokenRewrite):
    """A `TokenRewrite` that adds tokens to every layer."""

    def __init__(
        self,
        model_class: type[BlockPreTrainedModel],
        config: TokenConfig,
        sizes: TokenCounts,
        *,
        init: str,
        scale: str | None,
        seed: int,
        old_rate: float | None = None,
        copy: CopyTensor = copy_tensor,
        allocate: Allocate = allocate_rows,
    ) -> None:
        check_options(config, sizes, init, scale, old_rate)
        self.scale_policy = scale or ("current" if init in JUMPING else "frozen")
        self.init, self.target, self.allocate = init, sizes, allocate
        learned_scale = config.learned_scale or self.scale_policy == "learned"
        with torch.device("meta"):
            self.larger = model_class(
                config_with_tokens(config, sizes, learned_scale=learned_scale)
            )
        layers = token_layers(self.larger)
        self.routers = RouterGrowth({name: each for name, (_, each) in layers.items()}, copy, seed)
        super().__init__(
            layers,
            config,
            self.grow_layer,
            learned_scale=learned_scale,
            copy=self.routers,
            old_rate=old_rate,
            seed=seed,
        )

    @property
    def report_fields(self) -> dict[str, Any]:
        """Arguments of `report`."""
        return {"method": "tokens", "init": self.init, "scale": self.scale_policy}

    def tensors(
        self, read: Callable[[str], Tensor], names: Iterable[str]
    ) -> Generator[tuple[str, Tensor], None, None]:
        self.routers.read = read
        return super().tensors(read, names)

    def grow_layer(self, layer: str, projection: LayerProjection, before: TokenSet) -> Replacement:
        size, (_, module) = self.target[projection], self.layers[layer]
        # A generator per layer: layers grow in parallel, and the default generator is shared.
        generator = torch.Generator().manual_seed(named_seed(self.seed, layer))
        rows = NewRows(*self.larger.token_stds(module), generator, self.allocate)
        new = INITIALIZERS[self.init](before, size, rows)
        if self.scale_policy == "current":
            return with_scale(new, float(size))
        if isinstance(module, RoutedPattention) and module.norm == "chosen":
            # The layer multiplies the scale by the share of its tokens that are active.
            return with_scale(new, before.scale * size / before.size)
        return new


def with_scale(new: Replacement, scale: float) -> Replacement:
    return replace(new, tokens=replace(new.tokens, scale=scale))


@dataclass(frozen=True)
class NewRows:
    """Makes the new rows of one layer."""

    key_std: float
    value_std: float
    """Standard deviations that initialize a layer of the larger size."""
    generator: torch.Generator
    allocate: Allocate

    def extend(self, old: Tensor, size: int) -> Tensor:
        """Return the old rows followed by rows that are not initialized, `size` in all."""
        rows = self.allocate(old, size)
        rows[: old.shape[0]] = old
        return rows

    def fill_normal(self, rows: Tensor, std: float) -> None:
        """Fill with normal samples that are the same on every device and in every dtype."""
        in_place = rows.device.type == "cpu" and rows.dtype == torch.float32
        samples = rows if in_place else torch.empty(rows.shape)
        samples.normal_(0.0, std, generator=self.generator)
        if not in_place:
            rows.copy_(samples)

    def fill_spanning(self, rows: Tensor, old: Tensor) -> None:
        """Fill with m random keys R whose Gram matrix is m/n times that of the n old keys K, so
        that ||R x||^2 / m = ||K x||^2 / n for every x. With too few new keys, use normal keys of
        the same RMS."""
        count, wide = rows.shape[0], old.double().cpu()
        squares, directions = torch.linalg.eigh(wide.T @ wide)  # [d], [d, d]
        spanned = squares > RANK_TOLERANCE * squares[-1]
        rank = int(spanned.sum())
        if count < rank:
            self.fill_normal(rows, rms(old).item())
            return
        samples = torch.randn(count, rank, dtype=torch.float64, generator=self.generator)
        orthonormal = torch.linalg.qr(samples).Q  # [m, r]
        root = squares[spanned].sqrt()[:, None] * directions.T[spanned]  # [r, d], Gram matrix of K
        rows.copy_((count / old.shape[0]) ** 0.5 * orthonormal @ root)


def grow_zero(before: TokenSet, size: int, new: NewRows) -> Replacement:
    keys, values = new.extend(before.keys, size), new.extend(before.values, size)
    keys[before.size :].zero_()
    new.fill_normal(values[before.size :], new.value_std)
    return Replacement(TokenSet(keys, values, before.scale), extended_index(before.size, size))


def grow_random(before: TokenSet, size: int, new: NewRows) -> Replacement:
    grown = grow_zero(before, size, new)
    new.fill_normal(grown.tokens.keys[before.size :], new.key_std)
    return grown


def grow_zero_value(before: TokenSet, size: int, new: NewRows) -> Replacement:
    keys, values = new.extend(before.keys, size), new.extend(before.values, size)
    new.fill_spanning(keys[before.size :], before.keys)
    values[before.size :].zero_()
    scale = before.scale * size / before.size
    return Replacement(TokenSet(keys, values, scale), extended_index(before.size, size))


def grow_clone(before: TokenSet, size: int, new: NewRows) -> Replacement:
    number, rest = divmod(size, before.size)
    shares = (before.values / number).repeat(number, 1, 1)  # [k, n, d_out]
    if number > 1:
        noise = torch.randn(shares.shape, generator=new.generator) * (
            CLONE_NOISE * rms(shares).cpu()
        )
        shares += noise.to(shares)
        shares[-1] = before.values - shares[:-1].sum(0)  # so that rounding cancels too
    keys = before.keys.repeat(number, 1)
    copied = TokenSet(keys, shares.flatten(0, 1), number * before.scale)
    rows = torch.arange(before.size).repeat(number)
    if not rest:
        return Replacement(copied, rows, value_scale=1 / number)
    after = grow_zero(copied, size, new).tokens
    rows = torch.cat([rows, torch.full((rest,), NEW)])
    return Replacement(after, rows, value_scale=1 / number)


def grow_shrink(before: TokenSet, size: int, new: NewRows) -> Replacement:
    grown, factor = grow_random(before, size, new), math.sqrt(before.size / size)
    grown.tokens.values[: before.size] *= factor
    return Replacement(grown.tokens, grown.rows, value_scale=factor)


def rms(tensor: Tensor) -> Tensor:
    return tensor.float().square().mean().sqrt()


INITIALIZERS: dict[str, Callable[[TokenSet, int, NewRows], Replacement]] = {
    "zero": grow_zero,
    "random": grow_random,
    "zero_value": grow_zero_value,
    "clone": grow_clone,
    "shrink": grow_shrink,
}
CHANGE_OLD = ("clone", "shrink")
"""Inits that change the old tokens."""
JUMPING = ("random", "shrink")
"""Inits that change the output, so the scale may as well be that of the new count."""


def check_options(
    config: TokenConfig, sizes: TokenCounts, init: str, scale: str | None, old_rate: float | None
) -> None:
    if init not in INITIALIZERS:
        raise ValueError(f"init={init!r} is unknown; choose one of {', '.join(INITIALIZERS)}")
    if scale is not None and scale not in SCALE_POLICIES:
        raise ValueError(f"scale={scale!r} is unknown; choose one of {', '.join(SCALE_POLICIES)}")
    if config.learned_scale and scale not in (None, "learned"):
        raise ValueError(
            f"scale={scale!r}: this model's scales are learned; leave scale out, or use 'learned'"
        )
    check_routed_growth(config, sizes, init)
    if config.theta == "softmax":
        before = token_counts(config)
        # Rows do not choose the new groups of routed layers at growth.
        dense = [place for place in sizes if config.active(*place) is None]
        grows = any(sizes[place] != before[place] for place in dense)
        whole = all(sizes[place] % before[place] == 0 for place in dense)
        if (init == "zero" and grows) or (init == "clone" and not whole):
            raise ValueError(
                "with softmax a token with a zero key still has weight, so adding it changes the "
                "output; use init='clone' with a whole multiple of the tokens, or init='random'"
            )
    if init in CHANGE_OLD and (old_rate == 0 or has_frozen_tokens(config)):
        raise ValueError(
            f"some tokens are frozen, and init={init!r} would change them; use init='zero'"
        )


def has_frozen_tokens(config: TokenConfig) -> bool:
    return any(0 in (config.row_rates(*projection) or []) for projection in token_counts(config))
