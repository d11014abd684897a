"""A gated network, down(silu(gate(y)) * up(y)), which no tokens compute exactly.

The product of each hidden unit is approached by two tokens and a linear map,

    silu(g) u  ~  w (gelu(a g + b u + c) - gelu(a g - b u + c)) + (linear in g and u)

since gelu' rises where silu does. a, b and c are fitted to the unit's own g and u on data, by
gradient descent on the error that the best w and linear part leave. The linear parts of all units
are one linear map of y, through tokens of its own. Last, the values of all tokens together are
fitted to the network's output by ridge regression, where there are rows enough for them.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer.convert.pretrained.constructions import Affine, Site, linear_rows, sealed
from tokenformer.growth.tokens.token_set import TokenSet
from tokenformer.ops.theta import l2_gelu

ROWS = 1024
STEPS = 100
RATE = 0.05
UNITS_AT_ONCE = 256
ROWS_PER_TOKEN = 2
"""Rows that the last fit needs for every token."""
RIDGE = 1e-4
"""Of both fits, as a share of the mean square of a feature."""


def gated_output(y: Tensor, gate: Affine, up: Affine, down: Affine) -> Tensor:
    return down(F.silu(gate(y)) * up(y))


def gated_tokens(
    site: Site,
    gate: Affine,
    up: Affine,
    down: Affine,
    rows: Tensor,
    *,
    linear: str,
    approximate: str,
    ballast: float,
) -> TokenSet:
    """Tokens fitted on rows [R, d] of the network's input y."""
    fit = fit_units(gate(rows), up(rows), approximate)
    both = Affine(gate.weight * fit.a[:, None], gate.bias * fit.a + fit.c)
    apart = Affine(up.weight * fit.b[:, None], up.bias * fit.b)
    along = gate.weight * fit.of_gate[:, None] + up.weight * fit.of_up[:, None]
    constant = gate.bias * fit.of_gate + up.bias * fit.of_up + fit.constant
    keys, values, constant = linear_rows(site, Affine(down.weight @ along, down(constant)), linear)
    plus = site.keys(both.weight + apart.weight, both.bias + apart.bias)
    minus = site.keys(both.weight - apart.weight, both.bias - apart.bias)
    pairs = (down.weight * fit.w).T  # [m, d]
    tokens = sealed(
        site,
        torch.cat([keys, plus, minus]),
        torch.cat([values, pairs, -pairs]),
        constant,
        approximate,
        ballast,
    )
    if len(rows) < ROWS_PER_TOKEN * tokens.size:
        return tokens
    wanted = gated_output(rows, gate, up, down)
    return refitted(tokens, rows + site.offset, wanted, approximate)


@dataclass(frozen=True)
class UnitFit:
    """Of every hidden unit, [m]: w (gelu(a g + b u + c) - gelu(a g - b u + c)) and the rest."""

    a: Tensor
    b: Tensor
    c: Tensor
    w: Tensor
    of_up: Tensor
    of_gate: Tensor
    constant: Tensor


@torch.enable_grad()
def fit_units(gate: Tensor, up: Tensor, approximate: str) -> UnitFit:
    """From g and u [R, m] on data, in the units of their standard deviations."""
    places = torch.linspace(0, len(gate) - 1, min(ROWS, len(gate))).long()
    found = []
    for g, u in zip(
        gate[places].split(UNITS_AT_ONCE, 1), up[places].split(UNITS_AT_ONCE, 1), strict=True
    ):
        centre, spread, size = g.mean(0), g.std(0).clamp_min(1e-12), u.std(0).clamp_min(1e-12)
        wanted = F.silu(g) * u
        shape, weights = fit_shapes((g - centre) / spread, u / size, wanted, approximate)
        a, b, c = shape
        w, of_up, of_gate, constant = weights
        a, of_gate = a / spread, of_gate / spread
        shifted = constant - of_gate * centre
        found.append((a, b / size, c - a * centre, w, of_up / size, of_gate, shifted))
    return UnitFit(*(torch.cat(part) for part in zip(*found, strict=True)))


def fit_shapes(
    g: Tensor, u: Tensor, wanted: Tensor, approximate: str
) -> tuple[list[Tensor], Tensor]:
    """a, b and c, each [m], and the weights [4, m] of the pair, of u, of g and of a constant."""
    narrow, target = (g.float(), u.float()), (wanted / wanted.std(0).clamp_min(1e-12)).float()
    shape = [torch.full_like(target[0], start).requires_grad_() for start in (1.0, 0.7, 0.0)]
    optimizer = torch.optim.Adam(shape, lr=RATE)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
        features = unit_features(shape, *narrow, approximate)
        weights = best_weights(features.detach(), target)
        # At the best weights the error does not depend on them to first order.
        missing = (weights[:, None] * features).sum(0) - target
        optimizer.zero_grad()
        missing.square().sum().backward()
        optimizer.step()
    found = [part.detach().to(g) for part in shape]
    return found, best_weights(unit_features(found, g, u, approximate), wanted)


def unit_features(shape: list[Tensor], g: Tensor, u: Tensor, approximate: str) -> Tensor:
    a, b, c = shape
    level, apart = a * g + c, b * u
    pair = F.gelu(level + apart, approximate=approximate) - F.gelu(
        level - apart, approximate=approximate
    )
    return torch.stack([pair, u, g, torch.ones_like(g)])  # [4, R, m]


def best_weights(features: Tensor, wanted: Tensor) -> Tensor:
    """Ridge regression of every unit on its own features: [4, m]."""
    # Products of so few features are quicker one by one than as a batch of thin matrices.
    gram = torch.stack([(features * one).sum(1) for one in features]).permute(2, 0, 1)  # [m, 4, 4]
    damping = RIDGE * gram.diagonal(dim1=1, dim2=2).mean(-1)
    gram = gram + damping[:, None, None] * torch.eye(len(features)).to(gram)
    return torch.linalg.solve(gram, (features * wanted).sum(1).T).T


def refitted(tokens: TokenSet, x: Tensor, wanted: Tensor, approximate: str) -> TokenSet:
    """The values moved to where they serve best together, and no further than rows can tell."""
    weights = l2_gelu(x @ tokens.keys.T, tokens.scale, approximate, 0.0)  # [R, n]
    gram = weights.T @ weights
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    change = torch.linalg.solve(gram, weights.T @ (wanted - weights @ tokens.values))
    return TokenSet(tokens.keys, tokens.values + change, tokens.scale)
