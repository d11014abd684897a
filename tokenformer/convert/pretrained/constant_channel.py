"""A constant channel in the input of the output projection, which has no norm before it.

Attention weights sum to one, so a channel that is constant in the values is also constant in the
attention output. One channel of one key-value head is replaced by the constant. The values of a
head can be expressed in any basis if the output projection uses the same one. The replaced channel
is the one that changes the output least, over all heads and bases. With calibration data, a least
squares fit predicts it from the other channels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenformer.convert.pretrained.activation_statistics import Moments
from tokenformer.convert.pretrained.token_construction import RIDGE, Affine, InputSpace

FLOOR = 1e-12
"""Smallest eigenvalue of a head's output weights, relative to the mean; some may be zero."""


@dataclass(frozen=True)
class ConstantChannel:
    """The value and output projections with a constant channel, and maps from the source's."""

    v: Affine
    o: Affine
    space: InputSpace
    """The input of the output projection."""
    values: Affine
    """The source's values -> ours."""
    attended: Affine
    """The source's attention output, in all heads -> ours."""


def add_constant_channel(
    v: Affine, o: Affine, head_dim: int, max_norm: float, moments: Moments | None = None
) -> ConstantChannel:
    """Replace one channel by a constant. `max_norm` bounds the input of `v`; `moments` are those of
    the input of `o`, if there is data."""
    heads, groups = len(v.weight) // head_dim, o.weight.shape[1] // len(v.weight)
    head, basis, inverse = least_important_channel(v, o, head_dim, moments)
    identity = torch.eye(head_dim).to(basis)
    bases = [basis if index == head else identity for index in range(heads)]
    inverses = [inverse if index == head else identity for index in range(heads)]
    turn = torch.block_diag(*(part for part in bases for _ in range(groups)))
    back = torch.block_diag(*(part for part in inverses for _ in range(groups)))

    level = v.weight.square().sum(1).mean().sqrt().item()
    replaced = [head * head_dim]
    values = constant_at(replaced, level, torch.block_diag(*bases))
    new_v = Affine(values.weight @ v.weight, values(v.bias))
    replaced = [(head * groups + group) * head_dim for group in range(groups)]
    attended = constant_at(replaced, level, turn)
    new_o = drop_channels(Affine(o.weight @ back, o.bias), replaced, turn, moments)

    max_abs = new_v.weight.norm(dim=1) * max_norm + new_v.bias.abs()  # [kv]
    max_abs = max_abs.unflatten(0, (heads, head_dim)).repeat_interleave(groups, 0).flatten()  # [d]
    max_abs[replaced] = 0.0
    probe = torch.zeros_like(max_abs)
    probe[replaced] = groups**-0.5
    space = InputSpace(
        attended.bias, probe, level * groups**0.5, 0.0, max_abs.norm().item(), max_abs
    )
    return ConstantChannel(new_v, new_o, space, values, attended)


def constant_at(channels: list[int], level: float, basis: Tensor) -> Affine:
    """Return a change of basis that makes some channels constant."""
    weight, bias = basis.clone(), basis.new_zeros(len(basis))
    weight[channels], bias[channels] = 0.0, level
    return Affine(weight, bias)


def least_important_channel(
    v: Affine, o: Affine, head_dim: int, moments: Moments | None
) -> tuple[int, Tensor, Tensor]:
    """Return the key-value head of the channel to replace, a basis of the head in which that
    channel is the first, and the inverse basis."""
    heads, groups = len(v.weight) // head_dim, o.weight.shape[1] // len(v.weight)
    columns = o.weight.unflatten(1, (heads, groups, head_dim))  # [d, H_kv, groups, head_dim]
    covariances = head_covariances(v, head_dim, groups, moments)  # [H_kv, head_dim, head_dim]
    found = []
    for head in range(heads):
        through = columns[:, head].flatten(0, 1)  # [d groups, head_dim]
        metric = through.T @ through
        metric.diagonal().add_(FLOOR * metric.diagonal().mean() + torch.finfo(metric.dtype).tiny)
        lengths, axes = torch.linalg.eigh(metric)
        root = axes * lengths.sqrt() @ axes.T
        moved, turned = torch.linalg.eigh(root @ covariances[head] @ root)
        inverse = axes * lengths.rsqrt() @ axes.T @ turned
        found.append((moved[0].item(), head, turned.T @ root, inverse))
    return min(found, key=lambda entry: entry[0])[1:]


def head_covariances(v: Affine, head_dim: int, groups: int, moments: Moments | None) -> Tensor:
    """Return the covariance of the attention output by key-value head, [H_kv, D, D]."""
    if moments is None:
        rows = v.weight.unflatten(0, (-1, head_dim))  # [H_kv, head_dim, d]
        return rows @ rows.mT  # covariance of the values for isotropic y
    parts = moments.covariance.unflatten(0, (-1, head_dim)).unflatten(2, (-1, head_dim))
    own = parts.diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # [H, head_dim, head_dim]
    return own.unflatten(0, (-1, groups)).sum(1)


def drop_channels(o: Affine, replaced: list[int], turn: Tensor, moments: Moments | None) -> Affine:
    """Return the output projection without some input channels, predicted from the others if there
    is data."""
    weight, bias = o.weight.clone(), o.bias
    lost = weight[:, replaced]
    weight[:, replaced] = 0.0
    if moments is None:
        return Affine(weight, bias)
    kept = [channel for channel in range(weight.shape[1]) if channel not in replaced]
    covariance, mean = turn @ moments.covariance @ turn.T, turn @ moments.mean
    kept_covariance = covariance[kept][:, kept]
    floor = torch.finfo(kept_covariance.dtype).tiny
    kept_covariance.diagonal().add_(RIDGE * kept_covariance.diagonal().mean() + floor)
    predict = torch.linalg.solve(
        kept_covariance, covariance[kept][:, replaced]
    ).T  # [replaced, kept]
    weight[:, kept] += lost @ predict
    return Affine(weight, bias + lost @ (mean[replaced] - predict @ mean[kept]))
