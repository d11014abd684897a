"""Constructing tokens that compute a linear projection or a GELU MLP.

Pattention divides the scores by their norm and has no biases. A constant direction in its input
solves both. Let x = y + level u, with u a unit vector and u.y = 0. Then

    bias           the key w + (b / level) u scores w.y + b;
    ballast token  the key -(k / level) u scores -k on every row. Its weight is gelu(-k) = 0, but it
                   dominates the norm: ||A||^2 = k^2 + rest. With scale_tokens = k^2 + mean(rest)
                   the scores stay the same up to a relative error of rest / 2 k^2.

This gives a plain network gelu(K y + b) V, in which

    a GELU MLP            is a token per hidden unit;
    a linear projection   is a pair of tokens per channel, z = gelu(z) - gelu(-z), or one token per
                          channel shifted to where gelu is linear, z = gelu(z + B) - B for z + B
                          above `LINEAR_FROM`.

The output of a layer norm has mean zero, so u = 1 / sqrt(d) is free, and a bias of the norm sets
the level. Elsewhere the least important direction is replaced by the constant.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer.growth.tokens.token_set import TokenSet

BALLAST = 100.0
"""Score of the ballast token, relative to the largest norm of the other scores."""
LINEAR_FROM = 6.0
"""gelu(z) equals z above this, to nine digits."""
MIN_RELATIVE_SIZE = 1e-6
"""Smallest magnitude of a channel, relative to the largest, that is still scaled up."""
RIDGE = 1e-6
"""Smallest variance of a direction, relative to the mean."""
LAYER_NORM_BIAS = 0.1
"""Bias of a layer norm. Training moves all keys along the constant direction together; a smaller
bias reduces this, but below this value bf16 loses it."""
RMS_NORM_BIAS = 2.0
"""Bias of an RMS norm; larger, because the input is not exactly constant along its direction."""
CONSTANT_SCORE = 1.0
"""Score of the token that adds a constant."""
LINEAR_FORMS = ("pair", "shift")


@dataclass(frozen=True)
class Affine:
    """The affine map weight y + bias."""

    weight: Tensor  # [out, in]
    bias: Tensor  # [out]

    def __call__(self, y: Tensor) -> Tensor:
        return F.linear(y, self.weight.to(y), self.bias.to(y))

    def fold(self, weight: Tensor | None, bias: Tensor | None) -> "Affine":
        """Return this map applied after the weight and bias of a norm."""
        shift = self.bias if bias is None else self.bias + self.weight @ bias
        return Affine(self.weight if weight is None else self.weight * weight, shift)


@dataclass(frozen=True)
class InputSpace:
    """The input x = y + offset of a Pattention: its constant direction and its bounds."""

    offset: Tensor  # [d]
    probe: Tensor  # [d], the key that scores the constant
    level: float
    """probe.x"""
    lost: float
    """Mean of probe.y, which is lost if it is not zero."""
    max_norm: float
    """Largest ||y||."""
    max_abs: Tensor  # [d], largest |y_i|

    def keys(self, weight: Tensor, bias: Tensor) -> Tensor:
        """Return keys [n, d] that score weight y + bias, except for the part along probe.y."""
        along = self.along(weight)  # [n]
        constant = (bias + along * self.lost) / self.level - along
        return weight + constant[:, None] * self.probe

    def along(self, keys: Tensor) -> Tensor:
        """Return the component of keys along the probe, [n]."""
        return keys @ self.offset / (self.probe @ self.offset)


def layer_norm_space(size: int) -> InputSpace:
    """The output of a layer norm without weight and with the same bias in every channel."""
    length = math.sqrt(size)
    ones = torch.ones(size, dtype=torch.float64)
    return InputSpace(
        ones * LAYER_NORM_BIAS, ones / length, length * LAYER_NORM_BIAS, 0.0, length, ones * length
    )


def rms_norm_space(mean: Tensor, covariance: Tensor, readers: list[Affine]) -> InputSpace:
    """The output y of an RMS norm without weight, which has no constant direction.

    With a bias along the unit vector u, the projections w that read the output can only use keys
    with k.u = 0. The best one is w - (w.u) p with p = C^-1 u / (u C^-1 u), C the covariance of y.
    This loses (u W^T W u) times the variance of p.y, which is 1 / (u C^-1 u). As p also scores the
    constant, the outputs change in proportion to this variance over the constant's square. The sum
    of both is smallest for the smallest eigenvector of C^1/2 (W^T W + share) C^1/2, where share is
    the mean square of the outputs over the constant's square.
    """
    size, level = len(mean), RMS_NORM_BIAS * math.sqrt(len(mean))
    variances, axes = torch.linalg.eigh(covariance)
    root = axes * variances.clamp_min(RIDGE * variances.mean()).sqrt() @ axes.T  # C^1/2
    weights = torch.cat([reader.weight for reader in readers])
    loss = weights.T @ weights
    outputs = (loss * (covariance + torch.outer(mean, mean))).sum()  # their mean square
    loss.diagonal().add_(outputs / level**2)
    least = torch.linalg.eigh(root @ loss @ root)[1][:, 0]
    direction, probe = root @ least, torch.linalg.solve(root, least)
    length = direction.norm()
    direction, probe = direction / length, probe * length
    lost, max_norm = (probe @ mean).item(), math.sqrt(size)
    max_abs = torch.full_like(mean, max_norm)
    return InputSpace(direction * level, probe, level + lost, lost, max_norm, max_abs)


def mlp_tokens(
    space: InputSpace, up: Affine, down: Affine, approximate: str, ballast: float = BALLAST
) -> TokenSet:
    """Return tokens that compute down(gelu(up(y)))."""
    return add_ballast(
        space, space.keys(up.weight, up.bias), down.weight.T, down.bias, approximate, ballast
    )


def linear_tokens(
    space: InputSpace, linear: Affine, form: str, approximate: str, ballast: float = BALLAST
) -> TokenSet:
    """Return tokens that compute linear(y)."""
    return add_ballast(space, *linear_rows(space, linear, form), approximate, ballast)


def linear_rows(space: InputSpace, linear: Affine, form: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys, values and a constant that compute a linear projection. The tokens stand for the
    input or the output channels, whichever are fewer."""
    if form not in LINEAR_FORMS:
        raise ValueError(f"linear={form!r} is unknown; choose one of {', '.join(LINEAR_FORMS)}")
    out, size = linear.weight.shape
    if out < size:
        rows, columns, bias = linear.weight, torch.eye(out).to(linear.weight), linear.bias
        largest = rows.norm(dim=1) * space.max_norm + bias.abs()  # [channels]
        constant = torch.zeros_like(bias)
    else:
        moving = space.max_abs > 0
        rows, columns = torch.eye(size).to(linear.weight)[moving], linear.weight.T[moving]
        largest, constant, bias = space.max_abs[moving], linear.bias, rows.new_zeros(len(rows))
    if form == "pair":
        keys = torch.cat([space.keys(rows, bias), space.keys(-rows, -bias)])
        return keys, torch.cat([columns, -columns]), constant
    # Scores are between LINEAR_FROM and three times that; nearly constant channels are not scaled
    # up without limit.
    gain = LINEAR_FROM / largest.clamp_min(MIN_RELATIVE_SIZE * largest.max())
    keys = space.keys(rows * gain[:, None], bias * gain + 2 * LINEAR_FROM)
    values = columns / gain[:, None]
    return keys, values, constant - 2 * LINEAR_FROM * values.sum(0)


def add_ballast(
    space: InputSpace,
    keys: Tensor,
    values: Tensor,
    constant: Tensor,
    approximate: str,
    ballast: float,
) -> TokenSet:
    """Return the tokens plus one that adds a constant, and the ballast token."""
    weight = F.gelu(constant.new_tensor(CONSTANT_SCORE), approximate=approximate)
    keys = torch.cat([keys, space.probe[None] * (CONSTANT_SCORE / space.level)])
    constants = space.along(keys)  # [n]
    rest = keys - constants[:, None] * space.probe
    constants = constants * space.level
    # The squared norm of the scores: two upper bounds, and the mean for isotropic y.
    by_norm = torch.linalg.eigvalsh(rest.T @ rest)[-1] * space.max_norm**2
    by_channel = (rest.abs() @ space.max_abs).square().sum()
    largest = 2 * (torch.minimum(by_norm, by_channel) + constants.square().sum())
    mean = rest.square().sum() * space.max_norm**2 / rest.shape[1] + constants.square().sum()
    score = ballast * largest.sqrt().item()
    return TokenSet(
        torch.cat([keys, -score / space.level * space.probe[None]]),
        torch.cat([values, constant[None] / weight, torch.zeros_like(constant)[None]]),
        score**2 + mean.item(),
    )
