"""A constant channel for the output projection, which no norm precedes.

Attention averages values with weights that sum to one, so a channel of the values that is constant
is constant in what is attended too. All channels are taken; one is given up. In a key-value head
any basis of the values serves as well as any other, if the output projection is read in the same
one: the channel given up is the one, over all heads and bases, that moves the output least. With
data, what the other channels know of it is added to them by least squares.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenformer.convert.pretrained.activation_statistics import Moments
from tokenformer.convert.pretrained.constructions import RIDGE, Affine, Site

FLOOR = 1e-12
"""Least square of how much a channel counts, as a share of the mean: some may not count at all."""


@dataclass(frozen=True)
class SpareChannel:
    """Values and output projection as they are rewritten, and the way between the two forms."""

    v: Affine
    o: Affine
    site: Site
    """Of the output projection's input."""
    values: Affine
    """From the source's values to ours."""
    attended: Affine
    """From what the source attends to, in all heads, to ours."""


def spare_channel(
    v: Affine, o: Affine, head_dim: int, radius: float, moments: Moments | None = None
) -> SpareChannel:
    """`radius`: the largest norm of v's input; `moments`: of o's input, where there is data."""
    heads, groups = len(v.weight) // head_dim, o.weight.shape[1] // len(v.weight)
    head, basis, inverse = least_missed(v, o, head_dim, moments)
    same = torch.eye(head_dim).to(basis)
    bases = [basis if place == head else same for place in range(heads)]
    inverses = [inverse if place == head else same for place in range(heads)]
    turn = torch.block_diag(*(part for part in bases for _ in range(groups)))
    back = torch.block_diag(*(part for part in inverses for _ in range(groups)))

    level = v.weight.square().sum(1).mean().sqrt().item()
    given_up = [head * head_dim]
    values = constant_at(given_up, level, torch.block_diag(*bases))
    new_v = Affine(values.weight @ v.weight, values(v.bias))
    given_up = [(head * groups + group) * head_dim for group in range(groups)]
    attended = constant_at(given_up, level, turn)
    new_o = without(Affine(o.weight @ back, o.bias), given_up, turn, moments)

    reach = new_v.weight.norm(dim=1) * radius + new_v.bias.abs()  # [kv]
    reach = reach.unflatten(0, (heads, head_dim)).repeat_interleave(groups, 0).flatten()  # [d]
    reach[given_up] = 0.0
    probe = torch.zeros_like(reach)
    probe[given_up] = groups**-0.5
    site = Site(attended.bias, probe, level * groups**0.5, 0.0, reach.norm().item(), reach)
    return SpareChannel(new_v, new_o, site, values, attended)


def constant_at(places: list[int], level: float, basis: Tensor) -> Affine:
    """A change of basis after which some channels are constant."""
    weight, bias = basis.clone(), basis.new_zeros(len(basis))
    weight[places], bias[places] = 0.0, level
    return Affine(weight, bias)


def least_missed(
    v: Affine, o: Affine, head_dim: int, moments: Moments | None
) -> tuple[int, Tensor, Tensor]:
    """The key-value head with the channel to give up; a basis of it in which that is the first;
    its inverse."""
    heads, groups = len(v.weight) // head_dim, o.weight.shape[1] // len(v.weight)
    columns = o.weight.unflatten(1, (heads, groups, head_dim))  # [d, H_kv, groups, head_dim]
    spreads = spreads_of(v, head_dim, groups, moments)  # [H_kv, head_dim, head_dim]
    found = []
    for head in range(heads):
        through = columns[:, head].flatten(0, 1)  # [d groups, head_dim]
        metric = through.T @ through
        metric.diagonal().add_(FLOOR * metric.diagonal().mean() + torch.finfo(metric.dtype).tiny)
        lengths, axes = torch.linalg.eigh(metric)
        root = axes * lengths.sqrt() @ axes.T
        moved, turned = torch.linalg.eigh(root @ spreads[head] @ root)
        inverse = axes * lengths.rsqrt() @ axes.T @ turned
        found.append((moved[0].item(), head, turned.T @ root, inverse))
    return min(found, key=lambda entry: entry[0])[1:]


def spreads_of(v: Affine, head_dim: int, groups: int, moments: Moments | None) -> Tensor:
    """Covariance of what each key-value head's queries attend to, [H_kv, head_dim, head_dim]."""
    if moments is None:
        rows = v.weight.unflatten(0, (-1, head_dim))  # [H_kv, head_dim, d]
        return rows @ rows.mT  # of the values themselves, if y went all ways alike
    parts = moments.covariance.unflatten(0, (-1, head_dim)).unflatten(2, (-1, head_dim))
    own = parts.diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # [H, head_dim, head_dim]
    return own.unflatten(0, (-1, groups)).sum(1)


def without(o: Affine, given_up: list[int], turn: Tensor, moments: Moments | None) -> Affine:
    """The output projection without some channels of its input; with data, fitted to do without."""
    weight, bias = o.weight.clone(), o.bias
    lost = weight[:, given_up]
    weight[:, given_up] = 0.0
    if moments is None:
        return Affine(weight, bias)
    kept = [place for place in range(weight.shape[1]) if place not in given_up]
    covariance, mean = turn @ moments.covariance @ turn.T, turn @ moments.mean
    among = covariance[kept][:, kept]
    among.diagonal().add_(RIDGE * among.diagonal().mean() + torch.finfo(among.dtype).tiny)
    known = torch.linalg.solve(among, covariance[kept][:, given_up]).T  # [given up, kept]
    weight[:, kept] += lost @ known
    return Affine(weight, bias + lost @ (mean[given_up] - known @ mean[kept]))
