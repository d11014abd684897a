"""Tokens that compute what a linear map or a GELU network computes.

Pattention divides the scores by their norm, and has no biases. Both are mended by one constant
direction in its input. Let x = y + level u, with u a unit vector and u.y = 0. Then

    a bias       key w + (b / level) u scores w.y + b;
    the norm     a token with the key -(k / level) u scores -k on every row. Its weight is
                 gelu(-k) = 0, but in the norm it outweighs the others: ||A||^2 = k^2 + (the rest),
                 and with scale_tokens = k^2 + (the mean of the rest) the scores are left as they
                 are, up to (the rest) / 2 k^2 of themselves.

What is left is a plain network, gelu(K y + b) V, and in it

    a GELU MLP   is its own rows;
    a linear map is pairs of tokens, z = gelu(z) - gelu(-z), or one token a channel moved to where
                 gelu is linear, z = gelu(z + B) - B for z + B above `LINEAR_FROM`.

After a layer norm the direction is there for nothing: its output has mean zero, so u = 1 / sqrt(d),
and a bias of the norm makes the level. Where it is not, what is least missed is given up for it.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer.growth.tokens.token_set import TokenSet

BALLAST = 100.0
"""Score of the token that holds the norm, in units of the largest norm the others can have."""
LINEAR_FROM = 6.0
"""gelu(z) is z above it, to nine digits."""
STILL = 1e-6
"""A channel that moves by less of the most is one that moves by so much."""
RIDGE = 1e-6
"""Least variance of a direction, as a share of the mean."""
LEVEL = 0.1
"""Bias of a layer norm. Training moves all keys along a constant together: the less of it, the less
they do, down to where bf16 can no longer read it."""
RMS_LEVEL = 2.0
"""The same after an RMS norm, where what is given up for it blurs a small one."""
ONE = 1.0
"""Score of the token that stands for a constant."""
FORMS = ("pair", "shift")


@dataclass(frozen=True)
class Affine:
    """weight y + bias."""

    weight: Tensor  # [out, in]
    bias: Tensor  # [out]

    def __call__(self, y: Tensor) -> Tensor:
        return F.linear(y, self.weight.to(y), self.bias.to(y))

    def after(self, weight: Tensor | None, bias: Tensor | None) -> "Affine":
        """The same map of what comes before a norm's weight and bias."""
        shift = self.bias if bias is None else self.bias + self.weight @ bias
        return Affine(self.weight if weight is None else self.weight * weight, shift)


@dataclass(frozen=True)
class Site:
    """What is known of a Pattention's input x = y + offset."""

    offset: Tensor  # [d]
    probe: Tensor  # [d], the key that reads the constant
    level: float
    """probe.x"""
    lost: float
    """Mean of probe.y, which is given up where it is not zero to begin with."""
    radius: float
    """Largest ||y||."""
    reach: Tensor  # [d], largest |y_i|

    def keys(self, weight: Tensor, bias: Tensor) -> Tensor:
        """Keys [n, d] that score weight y + bias, as far as that can be told without probe.y."""
        along = self.along(weight)  # [n]
        constant = (bias + along * self.lost) / self.level - along
        return weight + constant[:, None] * self.probe

    def along(self, keys: Tensor) -> Tensor:
        """How much of the probe is in some keys."""
        return keys @ self.offset / (self.probe @ self.offset)


def layer_norm_site(size: int) -> Site:
    """After a layer norm without weight, with the same bias in every channel."""
    length = math.sqrt(size)
    ones = torch.ones(size, dtype=torch.float64)
    return Site(ones * LEVEL, ones / length, length * LEVEL, 0.0, length, ones * length)


def rms_norm_site(mean: Tensor, covariance: Tensor, readers: list[Affine]) -> Site:
    """After an RMS norm without weight, whose output y is constant nowhere.

    A bias along the unit vector u leaves its readers w only keys with k.u = 0, of which the best
    is w - (w.u) p with p = C^-1 u / (u C^-1 u), C the covariance of y. Of the variance of p.y,
    1 / (u C^-1 u), the readers W lose (u W^T W u) times as much; and as p reads the constant, their
    outputs move by its share of the constant's square. Both together are least for the smallest
    eigenvector of C^1/2 (W^T W + share) C^1/2.
    """
    size, level = len(mean), RMS_LEVEL * math.sqrt(len(mean))
    variances, axes = torch.linalg.eigh(covariance)
    root = axes * variances.clamp_min(RIDGE * variances.mean()).sqrt() @ axes.T  # C^1/2
    weights = torch.cat([reader.weight for reader in readers])
    missed = weights.T @ weights
    outputs = (missed * (covariance + torch.outer(mean, mean))).sum()  # their mean square
    missed.diagonal().add_(outputs / level**2)
    least = torch.linalg.eigh(root @ missed @ root)[1][:, 0]
    direction, probe = root @ least, torch.linalg.solve(root, least)
    length = direction.norm()
    direction, probe = direction / length, probe * length
    lost, radius = (probe @ mean).item(), math.sqrt(size)
    reach = torch.full_like(mean, radius)
    return Site(direction * level, probe, level + lost, lost, radius, reach)


def mlp_tokens(
    site: Site, up: Affine, down: Affine, approximate: str, ballast: float = BALLAST
) -> TokenSet:
    """down(gelu(up(y)))."""
    return sealed(
        site, site.keys(up.weight, up.bias), down.weight.T, down.bias, approximate, ballast
    )


def linear_tokens(
    site: Site, linear: Affine, form: str, approximate: str, ballast: float = BALLAST
) -> TokenSet:
    """linear(y)."""
    return sealed(site, *linear_rows(site, linear, form), approximate, ballast)


def linear_rows(site: Site, linear: Affine, form: str) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and a constant that make a linear map, through as few channels as it can go
    through: those of its input or those of its output."""
    if form not in FORMS:
        raise ValueError(f"linear={form!r} is unknown; choose one of {', '.join(FORMS)}")
    out, size = linear.weight.shape
    if out < size:
        rows, columns, bias = linear.weight, torch.eye(out).to(linear.weight), linear.bias
        largest = rows.norm(dim=1) * site.radius + bias.abs()  # [channels]
        constant = torch.zeros_like(bias)
    else:
        moving = site.reach > 0
        rows, columns = torch.eye(size).to(linear.weight)[moving], linear.weight.T[moving]
        largest, constant, bias = site.reach[moving], linear.bias, rows.new_zeros(len(rows))
    if form == "pair":
        keys = torch.cat([site.keys(rows, bias), site.keys(-rows, -bias)])
        return keys, torch.cat([columns, -columns]), constant
    # So that the scores of a channel are from LINEAR_FROM to three times that; a channel that is
    # all but still is moved no more than others are.
    gain = LINEAR_FROM / largest.clamp_min(STILL * largest.max())
    keys = site.keys(rows * gain[:, None], bias * gain + 2 * LINEAR_FROM)
    values = columns / gain[:, None]
    return keys, values, constant - 2 * LINEAR_FROM * values.sum(0)


def sealed(
    site: Site, keys: Tensor, values: Tensor, constant: Tensor, approximate: str, ballast: float
) -> TokenSet:
    """These tokens, one that adds a constant and one that holds the norm."""
    weight = F.gelu(constant.new_tensor(ONE), approximate=approximate)
    keys = torch.cat([keys, site.probe[None] * (ONE / site.level)])
    constants = site.along(keys)  # [n]
    rest = keys - constants[:, None] * site.probe
    constants = constants * site.level
    # The squared norm of these scores: at most, and if y went all ways alike.
    longest = torch.linalg.eigvalsh(rest.T @ rest)[-1] * site.radius**2
    widest = (rest.abs() @ site.reach).square().sum()
    largest = 2 * (torch.minimum(longest, widest) + constants.square().sum())
    mean = rest.square().sum() * site.radius**2 / rest.shape[1] + constants.square().sum()
    held = ballast * largest.sqrt().item()
    return TokenSet(
        torch.cat([keys, -held / site.level * site.probe[None]]),
        torch.cat([values, constant[None] / weight, torch.zeros_like(constant)[None]]),
        held**2 + mean.item(),
    )
