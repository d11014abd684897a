"""Position encodings: rotary, learned, or none.

All share one signature, `positions(hidden, position_ids) -> (hidden, rotation)`: learned positions
change the hidden states, rotary positions return a rotation for attention, `NoPositions` does
neither.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tokenformer.ops.backends.auto import is_plain
from tokenformer.ops.backends.native import rotary

Rotation = tuple[Tensor, Tensor]
"""cos and sin, each [B, T, rotary_dim]."""


class RotaryPositions(nn.Module):
    """Rotates the first `dim` channels of every head by an angle that grows with the position.

    The frequencies are recomputed in each forward: they are few, and a buffer would be lost on the
    meta device and rounded by `model.bfloat16()`.
    """

    def __init__(self, dim: int, base: float = 10000.0) -> None:
        super().__init__()
        if dim < 2 or dim % 2:
            raise ValueError(f"rotary dim={dim} must be even and at least 2")
        self.dim = dim
        self.base = base

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Rotation]:
        exponents = torch.arange(0, self.dim, 2, device=hidden.device, dtype=torch.float32)
        frequencies = self.base ** (-exponents / self.dim)  # [dim / 2]
        angles = position_ids[..., None].float() * frequencies  # [B, T, dim / 2]
        angles = torch.cat((angles, angles), dim=-1)  # [B, T, dim]
        return hidden, (angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype))

    def extra_repr(self) -> str:
        return f"dim={self.dim}, base={self.base:g}"


class LearnedPositions(nn.Embedding):
    """One learned vector per position, added to the embeddings."""

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if hidden.shape[-2] > self.num_embeddings:
            raise ValueError(
                f"a sequence of {hidden.shape[-2]} is longer than the {self.num_embeddings} "
                "learned positions"
            )
        return hidden + super().forward(position_ids), None


class NoPositions(nn.Module):
    """No encoding: only the causal mask gives the order, as in the paper's own figures."""

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, None]:
        return hidden, None


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the leading channels of `heads` [B, H, T, head_dim], in NeoX's rotate-half layout:
    channel i is paired with channel i + dim/2, not with its neighbour."""
    return rotate_all((heads,), rotation)[0]


def rotate_all(several: Sequence[Tensor], rotation: Rotation) -> Sequence[Tensor]:
    """Rotate queries and keys in one call."""
    cos, sin = rotation  # [B, T, dim]
    if is_plain(cos, sin, *several) and all(rotary.supports(h, cos, sin) for h in several):
        return rotary.rotate_all(cos, sin, *several)
    return [rotate_half(heads, cos.unsqueeze(1), sin.unsqueeze(1)) for heads in several]


def rotate_half(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation by cos and sin [B, 1, T, dim] in torch's operations."""
    rotated, rest = heads.split((cos.shape[-1], heads.shape[-1] - cos.shape[-1]), dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((rotated, rest), dim=-1)
