"""Widening a Transformer by replicas: what Net2Net, bert2BERT, HyperCloning and LEMON share.

Along each axis a new unit is a copy of an old one, and the replicas of a unit share among them what
it gave to the next layer. Three axes are enough to say where every weight of the larger model comes
from: the channels of the residual stream, one map for the whole model; the heads, always whole, and
the hidden units of the feed-forward network, a map per layer.

    a matrix that reads the stream (q, k, v, up, gate, an untied head)   columns shared
    a matrix that writes to it (o, down)                                 rows copied, columns shared
    embeddings, learned positions                                        columns copied
    norms                                                                copied

A tied embedding cannot be copied and shared at once: there the final norm carries the shares.

A layer norm over the wider stream gives `gain` times what it gave, channel by channel: 1 where
every channel is replicated equally often, and then growth is exact. Else see `lemon.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenformer.growth.origin import NEW, Origin
from tokenformer.growth.transformer.expansion import Expansion, in_layer, place_of
from tokenformer.models.configuration import TransformerConfig

EMBEDDINGS = ("model.embed_tokens", "model.positions")
READERS = {"q": "heads", "k": "key_values", "v": "key_values", "up": "units", "gate": "units"}
WRITERS = {"o": "heads", "down": "units"}
FINAL_NORM, HEAD = "model.norm", "lm_head"

Choose = Callable[[int, int, torch.Generator], Tensor]
"""(before, after, generator) -> which old unit each new one copies, the first in their places."""


@dataclass(frozen=True)
class Replicas:
    """Which old unit each new one copies, and its share of what the old one gave."""

    index: Tensor
    shares: Tensor
    """They sum to 1 over the replicas of a unit."""

    def channels(self, size: int) -> "Replicas":
        """The same of units that have `size` channels each, as heads do."""
        index = self.index[:, None] * size + torch.arange(size)
        return Replicas(index.flatten(), self.shares.repeat_interleave(size))


@dataclass(frozen=True)
class Stream(Replicas):
    """The residual stream's. A channel that is no copy, MEAN or NEW (zero), has no share."""

    gain: float = 1.0
    """What a norm's output becomes, before its weight."""

    @property
    def read(self) -> Tensor:
        """Where the columns of a reader come from: no old one fits a channel that is no copy."""
        return self.index.clamp_min(NEW)


@dataclass(frozen=True)
class LayerMaps:
    """Channels of the query heads and of the key-value heads, and units of the MLP."""

    heads: Replicas
    key_values: Replicas
    units: Replicas


def share(index: Tensor, before: int, unevenness: float, generator: torch.Generator) -> Tensor:
    """What the replicas of a unit get: 1 over their number, or that times 1 +- `unevenness`."""
    drawn = torch.rand(len(index), generator=generator, dtype=torch.float64)
    shares = 1 + unevenness * (2 * drawn - 1)
    copies = index >= 0
    totals = torch.zeros(before, dtype=torch.float64)
    totals.index_add_(0, index[copies], shares[copies])
    return torch.where(copies, shares / totals[index.clamp_min(0)], 0.0)


def map_layer(
    expansion: Expansion, layer: int, choose: Choose, unevenness: float = 0.0
) -> LayerMaps:
    """Key-value heads are copied with the query heads that use them, each with all of them, so that
    the gradient of a replica is its share of the old one's also where heads are grouped."""
    before, after = expansion.before, expansion.after

    def replicate(name: str, old: int, new: int) -> Replicas:
        generator = expansion.generator(f"{name} of layer {layer}")
        index = choose(old, new, generator)
        return Replicas(index, share(index, old, unevenness, generator))

    key_values = replicate("heads", before.num_key_value_heads, after.num_key_value_heads)
    index, shares = [], []
    group, new_group = group_size(before), group_size(after)
    for number, source in enumerate(key_values.index):
        within = replicate(f"group {number}", group, new_group)
        index.append(source * group + within.index)
        shares.append(key_values.shares[number] * within.shares)
    heads = Replicas(torch.cat(index), torch.cat(shares))
    size = before.head_dim
    return LayerMaps(
        heads.channels(size),
        key_values.channels(size),
        replicate("units", before.intermediate_size, after.intermediate_size),
    )


def group_size(config: TransformerConfig) -> int:
    """Query heads of one key-value head."""
    return config.num_attention_heads // config.num_key_value_heads


def circular(before: int, after: int, generator: torch.Generator) -> Tensor:
    """The old units over and over."""
    return torch.arange(after) % before


def widen(
    expansion: Expansion,
    stream: Stream,
    maps: Callable[[int], LayerMaps],
    layers: list[int | None],
    noise: float = 0.0,
) -> tuple[dict[str, Tensor], dict[str, Origin]]:
    """The parameters of the larger model and their origins.

    Args:
        maps: of each new layer.
        layers: for each new layer the old one that it comes from; None for one that adds nothing
            to the stream.
        noise: standard deviation of what is added to the shared columns of each matrix, as a share
            of its own; it sums to zero over replicas, so that it tells them apart and nothing more.
    """
    check_head(expansion)
    layer_maps = [maps(layer) for layer in range(len(layers))]
    parameters: dict[str, Tensor] = {}
    origins: dict[str, Origin] = {}
    for name in expansion.names:
        layer, place = place_of(name)
        source = None if layer is None else layers[layer]
        if layer is not None and source is None:
            parameters[name], origins[name] = identity(expansion, name), Origin(None)
            continue
        module = place.rpartition(".")[0]
        tied = module == FINAL_NORM and expansion.before.tie_word_embeddings
        origin = find_origin(
            in_layer(source, place), stream, layer_maps[layer or 0], carries_shares=tied
        )
        # A channel of the stream that is no copy holds the mean or zero, and nothing drawn.
        writes = module in EMBEDDINGS or module.rpartition(".")[2] in WRITERS
        made = expansion.placed(name, origin, draw=not writes)
        if noise and isinstance(origin.scale, Tensor) and origin.columns is not None:
            made = made + cancelling_noise(made, origin.columns, noise, expansion.generator(name))
        parameters[name], origins[name] = made, origin
    return parameters, origins


def find_origin(name: str, stream: Stream, maps: LayerMaps, *, carries_shares: bool) -> Origin:
    """Where a parameter comes from; `name` is the old one's."""
    module, _, kind = name.rpartition(".")
    last = module.rpartition(".")[2]
    if module in EMBEDDINGS:
        return Origin(name, None, stream.index, gradient_scale=stream.shares)
    if module == HEAD:
        return Origin(name, None, stream.read, stream.shares / stream.gain, stream.gain)
    if last in READERS:
        units: Replicas = getattr(maps, READERS[last])
        return Origin(
            name,
            units.index,
            stream.read,
            scale=stream.shares / stream.gain,
            gradient_scale=units.shares[:, None] * stream.gain,
        )
    if last in WRITERS:
        units = getattr(maps, WRITERS[last])
        return Origin(
            name, stream.index, units.index, units.shares, gradient_scale=stream.shares[:, None]
        )
    # A norm: its weight multiplies what has the gain already, its bias has to get it.
    gain = 1.0 if kind == "weight" else stream.gain
    if carries_shares:
        return Origin(
            name,
            stream.read,
            scale=stream.shares * gain / stream.gain,
            gradient_scale=stream.gain / gain,
        )
    return Origin(name, stream.read, scale=gain, gradient_scale=stream.shares / gain)


def identity(expansion: Expansion, name: str) -> Tensor:
    """A parameter of a layer that adds nothing to the stream, and can learn to."""
    fresh = expansion.fresh(name)
    writes = name.split(".")[-2] in WRITERS
    return torch.zeros_like(fresh) if writes else fresh


def cancelling_noise(
    matrix: Tensor, columns: Tensor, noise: float, generator: torch.Generator
) -> Tensor:
    """Noise that sums to zero over the replicas of every column."""
    columns = columns.to(matrix.device)
    deviation = matrix.float().square().mean().sqrt()
    drawn = torch.randn(matrix.shape, generator=generator).to(matrix) * (noise * deviation)
    number = columns.bincount()
    totals = matrix.new_zeros(len(matrix), len(number)).index_add_(1, columns, drawn)
    return drawn - (totals / number)[:, columns]


def spread(before: int, after: int) -> list[int | None]:
    """The old layers in their order, with new ones (None) evenly among them."""
    homes = {layer * after // before: layer for layer in range(before)}
    return [homes.get(place) for place in range(after)]


def check_head(expansion: Expansion) -> None:
    config = expansion.before
    carried = "weight" in config.final_norm_parameters.split("_")
    if expansion.widens and config.tie_word_embeddings and not carried:
        raise ValueError(
            f"final_norm_parameters={config.final_norm_parameters!r}: to widen a model with tied "
            "embeddings the final norm needs a weight, which carries what cannot be divided in them"
        )


def check_noise(noise: float) -> None:
    if not 0 <= noise < 1:
        raise ValueError(f"noise={noise} must be at least 0 and below 1")
