"""Growing parameter tokens: a trained TokenFormer becomes a larger one.

    grown, report = tokenformer.grow(model, to="354m", init="zero")

| init         | new keys                  | new values | scale s becomes | output            |
|--------------|---------------------------|------------|-----------------|-------------------|
| `zero`       | zero                      | random     | s               | exactly as before |
| `random`     | random                    | random     | the new count   | jumps             |
| `zero_value` | random, with the old      | zero       | s n'/n          | exactly as before |
|              | ones' Gram matrix         |            |                 |                   |
| `clone`      | k copies of the old, the  | old / k    | k s             | exactly as before |
|              | remainder zero            | plus noise |                 |                   |

A zero key scores zero against every input, adds nothing to the norm and gets the weight gelu(0) =
0. k copies multiply the norm by sqrt(k), which the scale k s undoes, and divide the value among
them; noise on the copies' values, which sums to zero, breaks the symmetry. m new keys with the Gram
matrix m/n K^T K make every row's norm sqrt(n'/n) times as long, which the scale s n'/n undoes:
`zero_value` is exact where the norm is of the scores (`l2_gelu`) and there are at least as many new
tokens as the old keys span dimensions; otherwise nearly so.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenformer.growth.growth_report import GrowthReport
from tokenformer.growth.origin import NEW, added_rows
from tokenformer.growth.tokens.rewrite import TokenRewrite
from tokenformer.growth.tokens.token_counts import (
    Place,
    Sizes,
    config_with_tokens,
    sizes_of,
    target_sizes,
)
from tokenformer.growth.tokens.token_set import Replacement, TokenSet, token_layers
from tokenformer.models.configuration import TokenConfig, Tokens
from tokenformer.models.seeds import named_seed

SCALES = ("frozen", "current", "anneal", "learned")
ROUNDING = 1e-13
"""Of float64: directions with less than this share of the largest square are not spanned."""
CLONE_NOISE = 0.1
"""Standard deviation of the noise on the copies' values, as a share of theirs."""


def grow_tokens(
    model: Any,
    to: str | TokenConfig | None = None,
    *,
    init: str = "zero",
    scale: str | None = None,
    seed: int = 0,
    old_rate: float | None = None,
    **tokens: Tokens,
) -> tuple[Any, GrowthReport]:
    """A larger copy of `model`, and a report. `model` itself is not changed.

    Args:
        model: a TokenFormer, grown before or not.
        to: a preset of the same width and depth, or a configuration.
        init: `zero`, `random`, `zero_value` or `clone`; see the table above.
        scale: `frozen` uses the scale of the table; `current` the new token count; `anneal` starts
            at the first and moves to the second in training (`train.scale`); `learned` starts at
            the first and becomes a parameter. By default `current` for `random`, else `frozen`.
        seed: of the random initialization.
        old_rate: a factor on the learning rate of the existing tokens: 0 freezes them. By default
            they train as before.
        **tokens: instead of `to`, any of qkv_tokens, output_tokens, ffn_tokens, q_tokens, k_tokens
            and v_tokens: an int, or one per layer.
    """
    if not isinstance(model.config, TokenConfig):
        raise TypeError(f"only a TokenFormer grows by tokens, not a {type(model).__name__}")
    sizes = target_sizes(model.config, to, tokens)
    growth = TokenGrowth(
        type(model), model.config, sizes, init=init, scale=scale, seed=seed, old_rate=old_rate
    )
    return growth.apply(model, **growth.about)


class TokenGrowth(TokenRewrite):
    """A rewrite that adds tokens to every layer."""

    def __init__(
        self,
        model_class: Any,
        config: TokenConfig,
        sizes: Sizes,
        *,
        init: str,
        scale: str | None,
        seed: int,
        old_rate: float | None = None,
    ) -> None:
        check(config, sizes, init, scale)
        if init == "clone" and (old_rate == 0 or is_frozen(config)):
            raise ValueError("some tokens are frozen: cloning would change them; use init='zero'")
        self.policy = scale or ("current" if init == "random" else "frozen")
        self.init, self.target = init, sizes
        with torch.device("meta"):
            self.larger = model_class(config_with_tokens(config, sizes))
        super().__init__(
            token_layers(self.larger),
            config,
            self.grow_layer,
            learned_scale=config.learned_scale or self.policy == "learned",
            old_rate=old_rate,
            seed=seed,
        )

    @property
    def about(self) -> dict[str, Any]:
        """As `report` takes it."""
        return {"method": "tokens", "init": self.init, "scale": self.policy}

    def grow_layer(self, layer: str, place: Place, before: TokenSet) -> Replacement:
        size, (_, module) = self.target[place], self.layers[layer]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(named_seed(self.seed, layer))
            new = GROW[self.init](before, size, Deviations(*self.larger.token_deviations(module)))
        if self.policy == "current":
            tokens = TokenSet(new.tokens.keys, new.tokens.values, float(size))
            return Replacement(tokens, new.rows, new.value_scale)
        return new


@dataclass(frozen=True)
class Deviations:
    """Standard deviations of keys and values in a freshly initialized layer of the larger size."""

    keys: float
    values: float


def grow_zero(before: TokenSet, size: int, fresh: Deviations) -> Replacement:
    keys, values = extended(before.keys, size), extended(before.values, size)
    draw(values[before.size :], fresh.values)
    return Replacement(TokenSet(keys, values, before.scale), added_rows(before.size, size))


def grow_random(before: TokenSet, size: int, fresh: Deviations) -> Replacement:
    new = grow_zero(before, size, fresh)
    draw(new.tokens.keys[before.size :], fresh.keys)
    return new


def grow_zero_value(before: TokenSet, size: int, fresh: Deviations) -> Replacement:
    keys, values = extended(before.keys, size), extended(before.values, size)
    draw_alike(keys[before.size :], before.keys)
    scale = before.scale * size / before.size
    return Replacement(TokenSet(keys, values, scale), added_rows(before.size, size))


def grow_clone(before: TokenSet, size: int, fresh: Deviations) -> Replacement:
    number, rest = divmod(size, before.size)
    shares = (before.values / number).repeat(number, 1, 1)  # [k, n, d_out]
    if number > 1:
        noise = torch.randn(shares.shape) * (CLONE_NOISE * rms(shares).cpu())
        shares += noise.to(shares)
        shares[-1] = before.values - shares[:-1].sum(0)  # whatever the others were rounded to
    keys = before.keys.repeat(number, 1)
    copied = TokenSet(keys, shares.flatten(0, 1), number * before.scale)
    rows = torch.arange(before.size).repeat(number)
    if not rest:
        return Replacement(copied, rows, value_scale=1 / number)
    after = grow_zero(copied, size, fresh).tokens
    rows = torch.cat([rows, torch.full((rest,), NEW)])
    return Replacement(after, rows, value_scale=1 / number)


def extended(old: Tensor, size: int) -> Tensor:
    """The old rows followed by zero rows, `size` in all; copied once, so that growing a large model
    runs at memory bandwidth."""
    new = old.new_zeros(size, old.shape[1])
    new[: old.shape[0]] = old
    return new


def draw(rows: Tensor, deviation: float) -> None:
    """Fill with random numbers that are the same on every device and in every dtype."""
    plain = rows.device.type == "cpu" and rows.dtype == torch.float32
    drawn = rows.normal_() if plain else torch.randn(rows.shape)
    rows.copy_(drawn.mul_(deviation))


def draw_alike(rows: Tensor, old: Tensor) -> None:
    """Fill with m random keys R whose Gram matrix is m/n times that of the n old keys K, so that
    ||R x||^2 / m = ||K x||^2 / n for every x; with too few new keys this holds on average."""
    count, wide = rows.shape[0], old.double().cpu()
    squares, directions = torch.linalg.eigh(wide.T @ wide)  # [d], [d, d]
    spanned = squares > ROUNDING * squares[-1]
    if count < spanned.sum():
        draw(rows, rms(old).item())
        return
    drawn = torch.randn(count, int(spanned.sum()), dtype=torch.float64)
    orthonormal = torch.linalg.qr(drawn).Q  # [m, r]
    shape = squares[spanned].sqrt()[:, None] * directions.T[spanned]  # [r, d], its Gram is K's
    rows.copy_((count / old.shape[0]) ** 0.5 * orthonormal @ shape)


def rms(tensor: Tensor) -> Tensor:
    return tensor.float().square().mean().sqrt()


GROW: dict[str, Callable[[TokenSet, int, Deviations], Replacement]] = {
    "zero": grow_zero,
    "random": grow_random,
    "zero_value": grow_zero_value,
    "clone": grow_clone,
}


def check(config: TokenConfig, sizes: Sizes, init: str, scale: str | None) -> None:
    if init not in GROW:
        raise ValueError(f"init={init!r} is unknown; choose one of {', '.join(GROW)}")
    if scale is not None and scale not in SCALES:
        raise ValueError(f"scale={scale!r} is unknown; choose one of {', '.join(SCALES)}")
    if config.learned_scale and scale not in (None, "learned"):
        raise ValueError(
            f"scale={scale!r}: this model's scales are learned; leave scale out, or use 'learned'"
        )
    if config.theta == "softmax":
        before = sizes_of(config)
        whole = all(size % before[place] == 0 for place, size in sizes.items())
        if init == "zero" or (init == "clone" and not whole):
            raise ValueError(
                "with softmax a token with a zero key still has weight, so adding it changes the "
                "output; use init='clone' with a whole multiple of the tokens, or init='random'"
            )


def is_frozen(config: TokenConfig) -> bool:
    return any(0 in (config.row_rates(*place) or []) for place in sizes_of(config))
