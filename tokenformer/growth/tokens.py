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
0. k copies multiply the norm by sqrt(k), which the scale k s undoes, and share the value among
them; the noise on the copies' values sums to zero and tells them apart for the optimizer. m new
keys with the Gram matrix m/n K^T K make every row's norm sqrt(n'/n) times as long, which the scale
undoes likewise: `zero_value` is exact where the norm is of the scores (`l2_gelu`) and there are at
least as many new tokens as the old keys span dimensions; else it is nearly so.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenformer.growth.assembly import assemble
from tokenformer.growth.origin import NEW, Origin, added_rows
from tokenformer.growth.plan import Place, Sizes, grown_config, sizes_of, target_sizes
from tokenformer.growth.probe import layer_change, output_change
from tokenformer.growth.report import GrowthReport, Part
from tokenformer.layers.pattention import Pattention
from tokenformer.models.accounting import count_parameters
from tokenformer.models.projection_configuration import TokenConfig, Tokens
from tokenformer.models.seeds import named_seed

INITS = ("zero", "random", "zero_value", "clone")
SCALES = ("frozen", "current", "anneal", "learned")
ROUNDING = 1e-13
"""Of float64: directions with less than this share of the largest square are not spanned."""
CLONE_NOISE = 0.1
"""Standard deviation of the noise on the copies' values, as a share of theirs."""


@dataclass(frozen=True)
class TokenSet:
    """The tokens of one layer and their scale."""

    keys: Tensor  # [n, d_in]
    values: Tensor  # [n, d_out]
    scale: float

    @property
    def size(self) -> int:
        return self.keys.shape[0]


@dataclass(frozen=True)
class Copies:
    """Which old token each new one is a copy of, NEW for none, and how many copies each has."""

    rows: Tensor
    number: int = 1

    def origins(self, layer: str) -> dict[str, Origin]:
        """k copies share a value, and with it the gradient of a key."""
        keys, values = f"{layer}.key_tokens", f"{layer}.value_tokens"
        return {
            keys: Origin(keys, self.rows, gradient_scale=1 / self.number),
            values: Origin(values, self.rows, scale=1 / self.number),
        }


def grow(
    model: Any,
    to: str | TokenConfig | None = None,
    *,
    init: str = "zero",
    scale: str | None = None,
    seed: int = 0,
    old_rate: float | None = None,
    **tokens: Tokens,
) -> tuple[Any, GrowthReport]:
    """A larger model that knows what `model` knows, and a report. `model` itself is left alone.

    Args:
        model: a TokenFormer, grown before or not.
        to: a preset of the same width and depth, or a configuration.
        init: `zero`, `random`, `zero_value` or `clone`; see the table above.
        scale: `frozen`, the one in the table; `current`, the new token count; `anneal`, which
            begins at the first, for training to lead to the second (`train.scale`); or `learned`,
            which begins at the first and is a parameter from then on. By default `current` for
            `random`, else `frozen`.
        seed: of what is drawn.
        old_rate: a factor on the learning rate of the tokens that are there already: 0 freezes
            them. By default they learn as before.
        **tokens: instead of `to`, any of qkv_tokens, output_tokens, ffn_tokens, q_tokens, k_tokens
            and v_tokens: an int, or one per layer.
    """
    if not isinstance(model.config, TokenConfig):
        raise TypeError(f"tokens grow in a TokenFormer, not in a {type(model).__name__}")
    state = model.state_dict()
    sizes = target_sizes(model.config, to, tokens)
    growth = TokenGrowth(
        type(model), model.config, sizes, init=init, scale=scale, seed=seed, old_rate=old_rate
    )
    larger = growth.build(growth.tensors(state.__getitem__, list(state)))
    larger.train(model.training)
    report = growth.report()
    report.pair(model, larger)
    report.max_output_change = output_change(model, larger, seed)
    return larger, report


class TokenGrowth:
    """One growth, tensor by tensor, so that the old model may be in memory or on disk."""

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
        self.model_class, self.before, self.sizes = model_class, config, sizes
        self.init, self.seed = init, seed
        self.policy = scale or ("current" if init == "random" else "frozen")
        self.learned = config.learned_scale or self.policy == "learned"
        self.old_rate = old_rate
        self.scales: dict[Place, float] = {}
        self.rates: dict[Place, list[float]] = {}
        self.parts: list[Part] = []
        self.origins: dict[str, Origin] = {}
        with torch.device("meta"):
            self.blank = model_class(grown_config(config, sizes))
        self.layers = layers_of(self.blank)

    @property
    def config(self) -> TokenConfig:
        """The larger model's, once its tensors are made."""
        return grown_config(
            self.before, self.sizes, self.scales, learned_scale=self.learned, rates=self.rates
        )

    def tensors(self, read: Callable[[str], Tensor], names: list[str]) -> dict[str, Tensor]:
        """The larger model's; `read` is asked for one of the old model's at a time."""
        made: dict[str, Tensor] = {}
        for name in names:
            layer, _, kind = name.rpartition(".")
            if layer not in self.layers:
                made[name] = read(name).clone()
                self.origins[name] = Origin(name)
            elif kind == "key_tokens":
                made |= self.grow_layer(layer, read)
        return made

    def grow_layer(self, layer: str, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        place, module = self.layers[layer]
        before = TokenSet(
            read(f"{layer}.key_tokens"),
            read(f"{layer}.value_tokens"),
            read(f"{layer}.scale_tokens").item()
            if self.before.learned_scale
            else self.before.scale(*place),
        )
        size = self.sizes[place]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(named_seed(self.seed, layer))
            fresh = Deviations(*self.blank.token_deviations(module))
            after, copies = GROW[self.init](before, size, fresh)
        if self.policy == "current":
            after = TokenSet(after.keys, after.values, float(size))
        self.scales[place] = after.scale
        rates = self.before.row_rates(*place) or [1.0] * before.size
        if self.old_rate is not None:
            rates = [self.old_rate] * before.size
        self.rates[place] = [1.0 if row == NEW else rates[row] for row in copies.rows.tolist()]
        self.origins |= copies.origins(layer)
        change = layer_change(module, (before.keys, before.values, before.scale),
                              (after.keys, after.values, after.scale), self.seed)  # fmt: skip
        self.parts.append(
            Part(layer, (before.size,), (after.size,), before.scale, after.scale, change)
        )
        made = {f"{layer}.key_tokens": after.keys, f"{layer}.value_tokens": after.values}
        if self.learned:
            name = f"{layer}.scale_tokens"
            made[name] = after.keys.new_tensor([after.scale])
            self.origins[name] = Origin(name if self.before.learned_scale else None)
        return made

    def build(self, tensors: dict[str, Tensor]) -> Any:
        """The larger model, of these very tensors."""
        return assemble(self.model_class, self.config, tensors)

    def report(self) -> GrowthReport:
        return GrowthReport(
            method="tokens",
            init=self.init,
            scale=self.policy,
            seed=self.seed,
            parts=self.parts,
            parameters_before=sum(count_parameters(self.before).values()),
            parameters_after=sum(count_parameters(self.config).values()),
            origins=self.origins,
        )


@dataclass(frozen=True)
class Deviations:
    """Of the keys and values that the larger layer would begin with."""

    keys: float
    values: float


def grow_zero(before: TokenSet, size: int, fresh: Deviations) -> tuple[TokenSet, Copies]:
    keys, values = extended(before.keys, size), extended(before.values, size)
    draw(values[before.size :], fresh.values)
    return TokenSet(keys, values, before.scale), Copies(added_rows(before.size, size))


def grow_random(before: TokenSet, size: int, fresh: Deviations) -> tuple[TokenSet, Copies]:
    after, copies = grow_zero(before, size, fresh)
    draw(after.keys[before.size :], fresh.keys)
    return after, copies


def grow_zero_value(before: TokenSet, size: int, fresh: Deviations) -> tuple[TokenSet, Copies]:
    keys, values = extended(before.keys, size), extended(before.values, size)
    draw_alike(keys[before.size :], before.keys)
    scale = before.scale * size / before.size
    return TokenSet(keys, values, scale), Copies(added_rows(before.size, size))


def grow_clone(before: TokenSet, size: int, fresh: Deviations) -> tuple[TokenSet, Copies]:
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
        return copied, Copies(rows, number)
    after, _ = grow_zero(copied, size, fresh)
    return after, Copies(torch.cat([rows, torch.full((rest,), NEW)]), number)


def extended(old: Tensor, size: int) -> Tensor:
    """The old rows, and zero ones to make `size`. Nothing is copied twice: growth of a large model
    is as fast as memory is."""
    new = old.new_zeros(size, old.shape[1])
    new[: old.shape[0]] = old
    return new


def draw(rows: Tensor, deviation: float) -> None:
    """Fill with numbers that are the same on every device and in every dtype."""
    plain = rows.device.type == "cpu" and rows.dtype == torch.float32
    drawn = rows.normal_() if plain else torch.randn(rows.shape)
    rows.copy_(drawn.mul_(deviation))


def draw_alike(rows: Tensor, old: Tensor) -> None:
    """Fill with random keys R whose Gram matrix is that of the old keys K, for their number: every
    x has ||R x||^2 / m = ||K x||^2 / n. Where they are too few for it, that holds on average."""
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


GROW = {
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
            f"scale={scale!r}: this model has learned its scales; they go on as learned"
        )
    if config.theta == "softmax":
        before = sizes_of(config)
        whole = all(size % before[place] == 0 for place, size in sizes.items())
        if init == "zero" or (init == "clone" and not whole):
            raise ValueError(
                "with softmax a token whose key is zero still has weight, so it cannot be added "
                "unseen; use init='clone' to a whole multiple of the tokens, or 'random'"
            )


def is_frozen(config: TokenConfig) -> bool:
    return any(0 in (config.row_rates(*place) or []) for place in sizes_of(config))


def layers_of(model: Any) -> dict[str, tuple[Place, Pattention]]:
    """The Pattention layers of a model by name, each with its projection and its layer's number."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Pattention):
            words = name.split(".")
            number = next(int(word) for word in words if word.isdigit())
            found[name] = ((words[-1], number), module)
    return found
