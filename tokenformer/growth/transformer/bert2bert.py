"""bert2BERT (arXiv 2110.07143): FPI or AKI for width, stacking for depth.

FPI (function-preserving initialization) is Net2Net's width: it copies random units, whole heads,
and divides by the number of replicas. It is exact for whole multiples of the width. AKI (advanced
knowledge initialization) takes the new output rows of a matrix from the same matrix of the *next*
layer; the last layer takes its own. This breaks the symmetry of replicas and is not exact.

Depth: the widened layers are stacked, as in `stacking.py`, which is not exact.

The optimizer and moving averages treat the rows that AKI takes from another layer as new.
"""

from dataclasses import replace

import torch
from torch import Tensor

from tokenformer.growth.parameter_mapping import NEW, ParameterMapping
from tokenformer.growth.transformer.expansion import Expansion, GrownWeights, full_name, split_name
from tokenformer.growth.transformer.net2net import widen_randomly
from tokenformer.growth.transformer.stacking import stacked_layers


def function_preserving(expansion: Expansion) -> GrownWeights:
    layers = stacked_layers(expansion.before.num_hidden_layers, expansion.after.num_hidden_layers)
    grown = widen_randomly(expansion, [*layers])
    grown.exact = grown.exact and len(layers) == expansion.before.num_hidden_layers
    return grown


def advanced_knowledge(expansion: Expansion) -> GrownWeights:
    grown = function_preserving(expansion)
    for name, mapping in grown.mappings.items():
        if mapping.source is not None and (above := next_layer(expansion, mapping.source)):
            grown.parameters[name], grown.mappings[name] = with_rows_of(
                above, expansion, name, mapping
            )
    grown.exact = False
    return grown


def next_layer(expansion: Expansion, name: str) -> str | None:
    """Return the name of the same matrix in the next layer, if there is one."""
    layer, suffix = split_name(name)
    if layer is None or expansion.old[name].ndim < 2:
        return None
    above = full_name(layer + 1, suffix)
    return above if above in expansion.old else None


def with_rows_of(
    above: str, expansion: Expansion, name: str, mapping: ParameterMapping
) -> tuple[Tensor, ParameterMapping]:
    assert mapping.source is not None
    assert mapping.rows is not None
    first_new = len(expansion.old[mapping.source])
    own = expansion.map_old(name, mapping)
    from_above = expansion.map_old(name, replace(mapping, source=above))
    rows = mapping.rows.clone()
    rows[first_new:] = NEW
    return torch.cat([own[:first_new], from_above[first_new:]]), replace(mapping, rows=rows)
