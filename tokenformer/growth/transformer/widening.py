"""Widening a Transformer by replicas: shared by Net2Net, bert2BERT, HyperCloning and LEMON.

Each new unit copies an old one, and the replicas of a unit share its output to the next layer.
Three kinds of units determine every weight of the larger model: the channels of the residual
stream, with one mapping for the whole model; whole heads and the hidden units of the feed-forward
network, with a mapping per layer.

    a matrix that reads the stream (q, k, v, up, gate, an untied head)   columns shared
    a matrix that writes to it (o, down)                                 rows copied, columns shared
    embeddings, learned positions                                        columns copied
    norms                                                                copied

A tied embedding cannot be both copied and shared, so the final norm is multiplied by the shares.

A norm over the wider stream outputs `gain` times the old output. The gain is 1, and growth exact,
if every channel has the same number of replicas. Otherwise see `lemon.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenformer.growth.parameter_mapping import NEW, ParameterMapping
from tokenformer.growth.transformer.expansion import Expansion, full_name, split_name
from tokenformer.models.configuration import TransformerConfig

EMBEDDINGS = ("model.embed_tokens", "model.positions")
READERS = {"q": "heads", "k": "key_values", "v": "key_values", "up": "units", "gate": "units"}
WRITERS = {"o": "heads", "down": "units"}
FINAL_NORM, HEAD = "model.norm", "lm_head"

ChooseUnits = Callable[[int, int, torch.Generator], Tensor]
"""(before, after, generator) -> the old unit each new one copies; the first are the old units."""


@dataclass(frozen=True)
class Replicas:
    """The old unit each new one copies, and its share of the old unit's output."""

    index: Tensor
    shares: Tensor
    """Sum to 1 over the replicas of a unit."""

    def channels(self, size: int) -> "Replicas":
        """Return the replicas of the channels of units with `size` channels each, such as heads."""
        index = self.index[:, None] * size + torch.arange(size)
        return Replicas(index.flatten(), self.shares.repeat_interleave(size))


@dataclass(frozen=True)
class StreamReplicas(Replicas):
    """Replicas of the channels of the residual stream. Padding channels (MEAN, or NEW for zero)
    have no share."""

    gain: float = 1.0
    """Factor on the output of a norm, before its weight."""

    @property
    def read(self) -> Tensor:
        """The index of a reader's columns: those of padding channels are new."""
        return self.index.clamp_min(NEW)


@dataclass(frozen=True)
class LayerReplicas:
    """Replicas of one layer: channels of query heads and key-value heads, units of the MLP."""

    heads: Replicas
    key_values: Replicas
    units: Replicas


def replica_shares(
    index: Tensor, before: int, unevenness: float, generator: torch.Generator
) -> Tensor:
    """Return the shares of the replicas: equal for `unevenness` 0, else in proportion to samples
    from 1 +- `unevenness`."""
    samples = torch.rand(len(index), generator=generator, dtype=torch.float64)
    shares = 1 + unevenness * (2 * samples - 1)
    copies = index >= 0
    totals = torch.zeros(before, dtype=torch.float64)
    totals.index_add_(0, index[copies], shares[copies])
    return torch.where(copies, shares / totals[index.clamp_min(0)], 0.0)


def layer_replicas(
    expansion: Expansion, layer: int, choose: ChooseUnits, unevenness: float = 0.0
) -> LayerReplicas:
    """Return the replicas of one layer. A key-value head is copied together with all of its query
    heads, so that a replica's gradient is its share of the old one with grouped heads too."""
    before, after = expansion.before, expansion.after

    def replicate(name: str, old: int, new: int) -> Replicas:
        generator = expansion.generator(f"{name} of layer {layer}")
        index = choose(old, new, generator)
        return Replicas(index, replica_shares(index, old, unevenness, generator))

    key_values = replicate("heads", before.num_key_value_heads, after.num_key_value_heads)
    index, shares = [], []
    group, new_group = group_size(before), group_size(after)
    for number, source in enumerate(key_values.index):
        within = replicate(f"group {number}", group, new_group)
        index.append(source * group + within.index)
        shares.append(key_values.shares[number] * within.shares)
    heads = Replicas(torch.cat(index), torch.cat(shares))
    size = before.head_dim
    return LayerReplicas(
        heads.channels(size),
        key_values.channels(size),
        replicate("units", before.intermediate_size, after.intermediate_size),
    )


def group_size(config: TransformerConfig) -> int:
    """Query heads per key-value head."""
    return config.num_attention_heads // config.num_key_value_heads


def cyclic(before: int, after: int, generator: torch.Generator) -> Tensor:
    """Copy the old units in turn."""
    return torch.arange(after) % before


def widen(
    expansion: Expansion,
    stream: StreamReplicas,
    maps: Callable[[int], LayerReplicas],
    layers: list[int | None],
    noise: float = 0.0,
) -> tuple[dict[str, Tensor], dict[str, ParameterMapping]]:
    """Return the parameters of the larger model and their mappings.

    Args:
        maps: returns the replicas of a new layer.
        layers: the old layer of each new one; None for an identity layer.
        noise: standard deviation of noise on the shared columns of each matrix, relative to the
            matrix's RMS. It sums to zero over replicas, so the function does not change.
    """
    check_tied_head(expansion)
    layer_maps = [maps(layer) for layer in range(len(layers))]
    parameters: dict[str, Tensor] = {}
    mappings: dict[str, ParameterMapping] = {}
    for name in expansion.names:
        layer, suffix = split_name(name)
        source = None if layer is None else layers[layer]
        if layer is not None and source is None:
            parameters[name], mappings[name] = (
                identity_parameter(expansion, name),
                ParameterMapping(None),
            )
            continue
        module = suffix.rpartition(".")[0]
        tied = module == FINAL_NORM and expansion.before.tie_word_embeddings
        mapping = map_parameter(
            full_name(source, suffix), stream, layer_maps[layer or 0], carries_shares=tied
        )
        # Padding channels of the stream hold the mean or zero, so they are not initialized.
        writes = module in EMBEDDINGS or module.rpartition(".")[2] in WRITERS
        made = expansion.map_old(name, mapping, initialize=not writes)
        if noise and isinstance(mapping.scale, Tensor) and mapping.columns is not None:
            made = made + cancelling_noise(made, mapping.columns, noise, expansion.generator(name))
        parameters[name], mappings[name] = made, mapping
    return parameters, mappings


def map_parameter(
    name: str, stream: StreamReplicas, maps: LayerReplicas, *, carries_shares: bool
) -> ParameterMapping:
    """Return the mapping of a parameter; `name` is the old name."""
    module, _, kind = name.rpartition(".")
    last = module.rpartition(".")[2]
    if module in EMBEDDINGS:
        return ParameterMapping(name, None, stream.index, gradient_scale=stream.shares)
    if module == HEAD:
        return ParameterMapping(name, None, stream.read, stream.shares / stream.gain, stream.gain)
    if last in READERS:
        units: Replicas = getattr(maps, READERS[last])
        return ParameterMapping(
            name,
            units.index,
            stream.read,
            scale=stream.shares / stream.gain,
            gradient_scale=units.shares[:, None] * stream.gain,
        )
    if last in WRITERS:
        units = getattr(maps, WRITERS[last])
        return ParameterMapping(
            name, stream.index, units.index, units.shares, gradient_scale=stream.shares[:, None]
        )
    # A norm: the gain is already in the input of its weight, but not in its bias.
    gain = 1.0 if kind == "weight" else stream.gain
    if carries_shares:
        return ParameterMapping(
            name,
            stream.read,
            scale=stream.shares * gain / stream.gain,
            gradient_scale=stream.gain / gain,
        )
    return ParameterMapping(name, stream.read, scale=gain, gradient_scale=stream.shares / gain)


def identity_parameter(expansion: Expansion, name: str) -> Tensor:
    """Return a parameter of an identity layer: zero if it writes to the stream."""
    parameter = expansion.initialized(name)
    writes = name.split(".")[-2] in WRITERS
    return torch.zeros_like(parameter) if writes else parameter


def cancelling_noise(
    matrix: Tensor, columns: Tensor, noise: float, generator: torch.Generator
) -> Tensor:
    """Return noise that sums to zero over the replicas of every column."""
    columns = columns.to(matrix.device)
    rms = matrix.float().square().mean().sqrt()
    samples = torch.randn(matrix.shape, generator=generator).to(matrix) * (noise * rms)
    number = columns.bincount()
    totals = matrix.new_zeros(len(matrix), len(number)).index_add_(1, columns, samples)
    return samples - (totals / number)[:, columns]


def interleave(before: int, after: int) -> list[int | None]:
    """Return the old layers in order, with new ones (None) evenly between them."""
    old_layer_at = {layer * after // before: layer for layer in range(before)}
    return [old_layer_at.get(position) for position in range(after)]


def check_tied_head(expansion: Expansion) -> None:
    config = expansion.before
    carried = "weight" in config.final_norm_parameters.split("_")
    if expansion.widens and config.tie_word_embeddings and not carried:
        raise ValueError(
            f"final_norm_parameters={config.final_norm_parameters!r}: widening a model with tied "
            "embeddings needs a final norm with a weight"
        )


def check_noise(noise: float) -> None:
    if not 0 <= noise < 1:
        raise ValueError(f"noise={noise} must be at least 0 and below 1")
