"""Converting one layer of a Transformer: its projections become five Pattentions.

After a layer norm the conversion is exact. The output projection loses one channel of one head
(`constant_channel`), a layer with RMS norms one direction of its inputs (`rms_norm_space`). A gated
MLP is fitted (`gated_mlp`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer.convert.pretrained.activation_statistics import (
    InputStatistics,
    LayerStatistics,
    PlainNorm,
)
from tokenformer.convert.pretrained.architectures import Block
from tokenformer.convert.pretrained.constant_channel import add_constant_channel
from tokenformer.convert.pretrained.gated_mlp import gated_output, gated_tokens
from tokenformer.convert.pretrained.token_construction import (
    Affine,
    InputSpace,
    layer_norm_space,
    linear_tokens,
    mlp_tokens,
    rms_norm_space,
)
from tokenformer.growth.tokens.token_set import TokenSet

MEASURED_EVERY = 8


@dataclass(frozen=True)
class ConversionSettings:
    """Settings that are the same for all layers."""

    norm: PlainNorm
    head_dim: int
    approximate: str
    linear: str
    ballast: float
    on_data: bool
    """Whether the statistics come from calibration data, which can be fitted to."""


@dataclass(frozen=True)
class ConvertedProjection:
    """A projection of the source as tokens, with rows to measure its error on."""

    projection: str
    form: str
    tokens: TokenSet
    parameters: int
    """Parameters of the projection in the source."""
    inputs: Tensor  # [R, d_in], inputs of our layer
    target: Tensor  # [R, d_out], outputs of the source
    norm: str | None
    """The norm before it."""
    offset: Tensor  # [d_in], the bias of that norm


def convert_block(
    block: Block, statistics: LayerStatistics, settings: ConversionSettings
) -> Iterator[ConvertedProjection]:
    """Yield the projections q, k, v, o and ffn of a layer."""

    def linear(
        name: str, space: InputSpace, part: Affine, x: Tensor, target: Tensor, norm: str | None
    ) -> ConvertedProjection:
        tokens = linear_tokens(space, part, settings.linear, settings.approximate, settings.ballast)
        size = part.weight.numel()
        return ConvertedProjection(
            name, settings.linear, tokens, size, x, target, norm, space.offset
        )

    space = space_after_norm(settings, statistics.attention, [block.q, block.k, block.v])
    y = settings.norm(statistics.attention.sample.double())
    x, norm = y + space.offset, "attention_norm"
    moments = statistics.output.moments if settings.on_data else None
    constant = add_constant_channel(block.v, block.o, settings.head_dim, space.max_norm, moments)
    attended = statistics.output.sample.double()
    yield linear("q", space, block.q, x, block.q(y), norm)
    yield linear("k", space, block.k, x, block.k(y), norm)
    yield linear("v", space, constant.v, x, constant.values(block.v(y)), norm)
    yield linear(
        "o", constant.space, constant.o, constant.attended(attended), block.o(attended), None
    )
    yield feed_forward(block, statistics.ffn, settings)


def feed_forward(
    block: Block, statistics: InputStatistics, settings: ConversionSettings
) -> ConvertedProjection:
    y = settings.norm(statistics.sample.double())
    approximate, ballast = settings.approximate, settings.ballast
    size = block.up.weight.numel() + block.down.weight.numel()
    if block.gate is None:
        space = space_after_norm(settings, statistics, [block.up])
        tokens = mlp_tokens(space, block.up, block.down, approximate, ballast)
        target = block.down(F.gelu(block.up(y), approximate=approximate))
        form = "own rows"
    else:
        space = space_after_norm(settings, statistics, [block.up, block.gate])
        maps = (block.gate, block.up, block.down)
        # The error is measured on rows that are not fitted.
        fitted_on = torch.arange(len(y)) % MEASURED_EVERY != 0
        tokens = gated_tokens(
            space,
            *maps,
            y[fitted_on],
            linear=settings.linear,
            approximate=approximate,
            ballast=ballast,
        )
        y = y[~fitted_on]
        target = gated_output(y, *maps)
        form, size = "fitted", size + block.gate.weight.numel()
    return ConvertedProjection(
        "ffn", form, tokens, size, y + space.offset, target, "ffn_norm", space.offset
    )


def space_after_norm(
    settings: ConversionSettings, statistics: InputStatistics, projections: list[Affine]
) -> InputSpace:
    if settings.norm.kind == "layer_norm":
        return layer_norm_space(projections[0].weight.shape[1])
    return rms_norm_space(statistics.moments.mean, statistics.moments.covariance, projections)
