"""bert2BERT (arXiv 2110.07143): width by function-preserving or by advanced knowledge, then depth.

FPI copies random units and divides by the number of their replicas in both dimensions of a matrix,
heads whole: Net2Net's width, exact to a whole multiple of it. AKI takes the new output rows of a
matrix from the same matrix of the *next* layer (the last layer has none, and takes its own). That
tells replicas apart and gives up exactness.

Depth, in both: the widened layers stacked, as in `stacking.py`. Not preserving.

The rows that AKI takes from another layer are new to the optimizer and to averages.
"""

from dataclasses import replace

import torch
from torch import Tensor

from tokenformer.growth.origin import NEW, Origin
from tokenformer.growth.transformer.expansion import Expansion, Grown, in_layer, place_of
from tokenformer.growth.transformer.net2net import widen_at_random
from tokenformer.growth.transformer.stacking import stacked


def function_preserving(expansion: Expansion) -> Grown:
    layers = stacked(expansion.before.num_hidden_layers, expansion.after.num_hidden_layers)
    grown = widen_at_random(expansion, [*layers])
    grown.exact = grown.exact and len(layers) == expansion.before.num_hidden_layers
    return grown


def advanced_knowledge(expansion: Expansion) -> Grown:
    grown = function_preserving(expansion)
    for name, origin in grown.origins.items():
        if origin.name is not None and (above := next_layer(expansion, origin.name)):
            grown.parameters[name], grown.origins[name] = with_rows_of(
                above, expansion, name, origin
            )
    grown.exact = False
    return grown


def next_layer(expansion: Expansion, name: str) -> str | None:
    """The matrix of the same place in the layer above, if there is one."""
    layer, place = place_of(name)
    if layer is None or expansion.old[name].ndim < 2:
        return None
    above = in_layer(layer + 1, place)
    return above if above in expansion.old else None


def with_rows_of(
    above: str, expansion: Expansion, name: str, origin: Origin
) -> tuple[Tensor, Origin]:
    assert origin.name is not None
    assert origin.rows is not None
    first_new = len(expansion.old[origin.name])
    own = expansion.placed(name, origin)
    borrowed = expansion.placed(name, replace(origin, name=above))
    rows = origin.rows.clone()
    rows[first_new:] = NEW
    return torch.cat([own[:first_new], borrowed[first_new:]]), replace(origin, rows=rows)
