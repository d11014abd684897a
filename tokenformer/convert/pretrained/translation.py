"""One layer of a Transformer in tokens: five Pattentions, and rows to compare them on.

After a layer norm a map is exact. The output projection gives up one channel of one head
(`spare_channel`), and a layer with RMS norms one direction of its inputs (`rms_norm_site`). A gated
network is fitted (`gated`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer.convert.pretrained.activation_statistics import Inputs, LayerInputs, PlainNorm
from tokenformer.convert.pretrained.architectures import Block
from tokenformer.convert.pretrained.constructions import (
    Affine,
    Site,
    layer_norm_site,
    linear_tokens,
    mlp_tokens,
    rms_norm_site,
)
from tokenformer.convert.pretrained.gated import gated_output, gated_tokens
from tokenformer.convert.pretrained.spare_channel import spare_channel
from tokenformer.growth.tokens.token_set import TokenSet

MEASURED_EVERY = 8


@dataclass(frozen=True)
class Settings:
    """What all layers have in common."""

    norm: PlainNorm
    head_dim: int
    approximate: str
    linear: str
    ballast: float
    on_data: bool
    """Whether the inputs are of text, so that something can be fitted on them."""


@dataclass(frozen=True)
class Translation:
    """A map of the source as tokens."""

    projection: str
    form: str
    tokens: TokenSet
    parameters: int
    """Of the map in the source."""
    inputs: Tensor  # [R, d_in], rows as ours sees them
    wanted: Tensor  # [R, d_out], what the source makes of them
    norm: str | None
    offset: Tensor  # [d_in]
    """The norm before it, and the bias that it must have."""


def translate(block: Block, seen: LayerInputs, settings: Settings) -> Iterator[Translation]:
    def linear(
        name: str, site: Site, part: Affine, x: Tensor, wanted: Tensor, norm: str | None
    ) -> Translation:
        tokens = linear_tokens(site, part, settings.linear, settings.approximate, settings.ballast)
        size = part.weight.numel()
        return Translation(name, settings.linear, tokens, size, x, wanted, norm, site.offset)

    site = site_after(settings, seen.attention, [block.q, block.k, block.v])
    y = settings.norm(seen.attention.sample.double())
    x, norm = y + site.offset, "attention_norm"
    moments = seen.output.moments if settings.on_data else None
    spare = spare_channel(block.v, block.o, settings.head_dim, site.radius, moments)
    attended = seen.output.sample.double()
    yield linear("q", site, block.q, x, block.q(y), norm)
    yield linear("k", site, block.k, x, block.k(y), norm)
    yield linear("v", site, spare.v, x, spare.values(block.v(y)), norm)
    yield linear("o", spare.site, spare.o, spare.attended(attended), block.o(attended), None)
    yield feed_forward(block, seen.ffn, settings)


def feed_forward(block: Block, seen: Inputs, settings: Settings) -> Translation:
    y = settings.norm(seen.sample.double())
    approximate, ballast = settings.approximate, settings.ballast
    size = block.up.weight.numel() + block.down.weight.numel()
    if block.gate is None:
        site = site_after(settings, seen, [block.up])
        tokens = mlp_tokens(site, block.up, block.down, approximate, ballast)
        wanted = block.down(F.gelu(block.up(y), approximate=approximate))
        form = "own rows"
    else:
        site = site_after(settings, seen, [block.up, block.gate])
        maps = (block.gate, block.up, block.down)
        # What is fitted is measured on other rows.
        fitted_on = torch.arange(len(y)) % MEASURED_EVERY != 0
        tokens = gated_tokens(
            site,
            *maps,
            y[fitted_on],
            linear=settings.linear,
            approximate=approximate,
            ballast=ballast,
        )
        y = y[~fitted_on]
        wanted = gated_output(y, *maps)
        form, size = "fitted", size + block.gate.weight.numel()
    return Translation("ffn", form, tokens, size, y + site.offset, wanted, "ffn_norm", site.offset)


def site_after(settings: Settings, seen: Inputs, readers: list[Affine]) -> Site:
    if settings.norm.kind == "layer_norm":
        return layer_norm_site(readers[0].weight.shape[1])
    return rms_norm_site(seen.moments.mean, seen.moments.covariance, readers)
