"""Fitting tokens to a gated MLP, down(silu(gate(y)) * up(y)), which they cannot compute exactly.

The product of each hidden unit is approximated by two tokens and a linear term,

    silu(g) u  ~  w (gelu(a g + b u + c) - gelu(a g - b u + c)) + (linear in g and u)

because gelu' has a similar shape to silu. Gradient descent fits a, b and c to the unit's g and u on
data, with the optimal w and linear term at every step. The linear terms of all units form one
linear projection of y, with its own tokens. Finally, ridge regression fits the values of all tokens
together to the output of the MLP, if there are enough rows.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer.convert.pretrained.token_construction import (
    Affine,
    InputSpace,
    add_ballast,
    linear_rows,
)
from tokenformer.growth.tokens.token_set import TokenSet
from tokenformer.ops.theta import l2_gelu

ROWS = 1024
STEPS = 100
RATE = 0.05
UNITS_AT_ONCE = 256
ROWS_PER_TOKEN = 2
"""Rows per token that the final regression needs."""
RIDGE = 1e-4
"""Ridge penalty, relative to the mean square of a feature."""


def gated_output(y: Tensor, gate: Affine, up: Affine, down: Affine) -> Tensor:
    return down(F.silu(gate(y)) * up(y))


def gated_tokens(
    space: InputSpace,
    gate: Affine,
    up: Affine,
    down: Affine,
    rows: Tensor,
    *,
    linear: str,
    approximate: str,
    ballast: float,
) -> TokenSet:
    """Return tokens fitted on rows [R, d] of the MLP's input y."""
    fit = fit_units(gate(rows), up(rows), approximate)
    mean_map = Affine(gate.weight * fit.a[:, None], gate.bias * fit.a + fit.c)
    difference_map = Affine(up.weight * fit.b[:, None], up.bias * fit.b)
    linear_weight = gate.weight * fit.gate_weight[:, None] + up.weight * fit.up_weight[:, None]
    linear_bias = gate.bias * fit.gate_weight + up.bias * fit.up_weight + fit.constant
    through_down = Affine(down.weight @ linear_weight, down(linear_bias))
    keys, values, constant = linear_rows(space, through_down, linear)
    plus = space.keys(mean_map.weight + difference_map.weight, mean_map.bias + difference_map.bias)
    minus = space.keys(mean_map.weight - difference_map.weight, mean_map.bias - difference_map.bias)
    pairs = (down.weight * fit.w).T  # [m, d]
    tokens = add_ballast(
        space,
        torch.cat([keys, plus, minus]),
        torch.cat([values, pairs, -pairs]),
        constant,
        approximate,
        ballast,
    )
    if len(rows) < ROWS_PER_TOKEN * tokens.size:
        return tokens
    target = gated_output(rows, gate, up, down)
    return refit_tokens(tokens, rows + space.offset, target, approximate)


@dataclass(frozen=True)
class UnitFit:
    """Fitted coefficients of every hidden unit, [m]:

    w (gelu(a g + b u + c) - gelu(a g - b u + c)) + up_weight u + gate_weight g + constant
    """

    a: Tensor
    b: Tensor
    c: Tensor
    w: Tensor
    up_weight: Tensor
    gate_weight: Tensor
    constant: Tensor


@torch.enable_grad()
def fit_units(gate: Tensor, up: Tensor, approximate: str) -> UnitFit:
    """Fit all units, given g and u [R, m] on data. Both are standardized for the fit."""
    sample = torch.linspace(0, len(gate) - 1, min(ROWS, len(gate))).long()
    fits = []
    for g, u in zip(
        gate[sample].split(UNITS_AT_ONCE, 1), up[sample].split(UNITS_AT_ONCE, 1), strict=True
    ):
        mean, g_std, u_std = g.mean(0), g.std(0).clamp_min(1e-12), u.std(0).clamp_min(1e-12)
        shape, weights = fit_shapes((g - mean) / g_std, u / u_std, F.silu(g) * u, approximate)
        a, b, c = shape
        w, up_weight, gate_weight, constant = weights
        a, gate_weight = a / g_std, gate_weight / g_std
        shifted = constant - gate_weight * mean
        fits.append((a, b / u_std, c - a * mean, w, up_weight / u_std, gate_weight, shifted))
    return UnitFit(*(torch.cat(part) for part in zip(*fits, strict=True)))


def fit_shapes(
    g: Tensor, u: Tensor, product: Tensor, approximate: str
) -> tuple[list[Tensor], Tensor]:
    """Return a, b and c, each [m], and the weights [4, m] of the pair, u, g and the constant."""
    narrow, target = (g.float(), u.float()), (product / product.std(0).clamp_min(1e-12)).float()
    shape = [torch.full_like(target[0], start).requires_grad_() for start in (1.0, 0.7, 0.0)]
    optimizer = torch.optim.Adam(shape, lr=RATE)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
        features = unit_features(shape, *narrow, approximate)
        weights = best_weights(features.detach(), target)
        # No gradient through the weights: at their optimum it is zero.
        error = (weights[:, None] * features).sum(0) - target
        optimizer.zero_grad()
        error.square().sum().backward()
        optimizer.step()
    fitted = [part.detach().to(g) for part in shape]
    return fitted, best_weights(unit_features(fitted, g, u, approximate), product)


def unit_features(shape: list[Tensor], g: Tensor, u: Tensor, approximate: str) -> Tensor:
    a, b, c = shape
    mean, difference = a * g + c, b * u
    pair = F.gelu(mean + difference, approximate=approximate) - F.gelu(
        mean - difference, approximate=approximate
    )
    return torch.stack([pair, u, g, torch.ones_like(g)])  # [4, R, m]


def best_weights(features: Tensor, target: Tensor) -> Tensor:
    """Return the ridge regression of every unit on its own features, [4, m]."""
    # Faster than a batched product of thin matrices.
    gram = torch.stack([(features * one).sum(1) for one in features]).permute(2, 0, 1)  # [m, 4, 4]
    damping = RIDGE * gram.diagonal(dim1=1, dim2=2).mean(-1)
    gram = gram + damping[:, None, None] * torch.eye(len(features)).to(gram)
    return torch.linalg.solve(gram, (features * target).sum(1).T).T


def refit_tokens(tokens: TokenSet, x: Tensor, target: Tensor, approximate: str) -> TokenSet:
    """Return the tokens with values fitted to the target by ridge regression."""
    weights = l2_gelu(x @ tokens.keys.T, tokens.scale, approximate, 0.0)  # [R, n]
    gram = weights.T @ weights
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    change = torch.linalg.solve(gram, weights.T @ (target - weights @ tokens.values))
    return TokenSet(tokens.keys, tokens.values + change, tokens.scale)
