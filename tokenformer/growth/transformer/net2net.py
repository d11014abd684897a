"""Net2Net (arXiv 1511.05641): new units copy random old ones, and replicas share the output.

Width: whole heads are copied, with their q, k and v, and the columns of W_O are divided by the
number of replicas. Units of the feed-forward network and the columns of its down projection are
treated the same way. The channels of the residual stream have one mapping for the whole model. A
layer norm divides by the standard deviation over all channels, so growth is exact if every channel
has the same number of replicas. This holds for whole multiples of the width, in random order. For
other widths the new channels copy random ones, as in the paper, and the report says `not exact`.

Depth: identity layers, evenly among the old ones. Their W_O and down projections are zero, the rest
is initialized as in a new model. Exact.

Replicas get equal gradients and stay equal unless `noise` breaks the symmetry.
"""

import torch
from torch import Tensor

from tokenformer.growth.transformer.expansion import Expansion, GrownWeights
from tokenformer.growth.transformer.widening import (
    StreamReplicas,
    check_noise,
    interleave,
    layer_replicas,
    replica_shares,
    widen,
)


def net2net(expansion: Expansion, *, noise: float = 0.0) -> GrownWeights:
    check_noise(noise)
    layers = interleave(expansion.before.num_hidden_layers, expansion.after.num_hidden_layers)
    return widen_randomly(expansion, layers, noise)


def widen_randomly(
    expansion: Expansion, layers: list[int | None], noise: float = 0.0
) -> GrownWeights:
    parameters, mappings = widen(
        expansion,
        random_stream(expansion),
        lambda layer: layer_replicas(expansion, layer, random_units),
        layers,
        noise,
    )
    return GrownWeights(expansion.after, parameters, mappings, exact=is_whole_multiple(expansion))


def is_whole_multiple(expansion: Expansion) -> bool:
    """Whether the new hidden size is a multiple of the old one."""
    return expansion.after.hidden_size % expansion.before.hidden_size == 0


def random_stream(expansion: Expansion) -> StreamReplicas:
    before, after = expansion.before.hidden_size, expansion.after.hidden_size
    generator = expansion.generator("stream")
    if is_whole_multiple(expansion):
        shuffled = [torch.randperm(before, generator=generator) for _ in range(after // before - 1)]
        index = torch.cat([torch.arange(before), *shuffled])
    else:
        index = random_units(before, after, generator)
    return StreamReplicas(index, replica_shares(index, before, 0.0, generator))


def random_units(before: int, after: int, generator: torch.Generator) -> Tensor:
    copies = torch.randint(before, (after - before,), generator=generator)
    return torch.cat([torch.arange(before), copies])
