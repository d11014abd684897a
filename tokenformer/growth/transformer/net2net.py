"""Net2Net (arXiv 1511.05641): a new unit copies a random old one; its replicas share its output.

Width: heads are copied whole, with their q, k and v, and the columns of W_O divided by the number
of replicas; so are the units of the feed-forward network with the columns of its down projection;
the channels of the residual stream have one map for the whole model. A layer norm divides by the
deviation over all channels, so the function is preserved where every channel is replicated equally
often: to a whole multiple of the width they are, in random order. To any other width the new
channels copy channels at random, as published, and the report says that it is not exact.

Depth: identity layers, evenly among the old ones. Their W_O and down projections are zero, the rest
is as in a new model. Exact.

Replicas get equal gradients and stay equal for ever, unless `noise` tells them apart.
"""

import torch
from torch import Tensor

from tokenformer.growth.transformer.expansion import Expansion, Grown
from tokenformer.growth.transformer.widening import (
    Stream,
    check_noise,
    map_layer,
    share,
    spread,
    widen,
)


def net2net(expansion: Expansion, *, noise: float = 0.0) -> Grown:
    check_noise(noise)
    layers = spread(expansion.before.num_hidden_layers, expansion.after.num_hidden_layers)
    return widen_at_random(expansion, layers, noise)


def widen_at_random(expansion: Expansion, layers: list[int | None], noise: float = 0.0) -> Grown:
    parameters, origins = widen(
        expansion,
        random_stream(expansion),
        lambda layer: map_layer(expansion, layer, at_random),
        layers,
        noise,
    )
    return Grown(expansion.after, parameters, origins, exact=is_whole(expansion))


def is_whole(expansion: Expansion) -> bool:
    """Whether the stream becomes a whole multiple of itself."""
    return expansion.after.hidden_size % expansion.before.hidden_size == 0


def random_stream(expansion: Expansion) -> Stream:
    before, after = expansion.before.hidden_size, expansion.after.hidden_size
    generator = expansion.generator("stream")
    if is_whole(expansion):
        shuffled = [torch.randperm(before, generator=generator) for _ in range(after // before - 1)]
        index = torch.cat([torch.arange(before), *shuffled])
    else:
        index = at_random(before, after, generator)
    return Stream(index, share(index, before, 0.0, generator))


def at_random(before: int, after: int, generator: torch.Generator) -> Tensor:
    drawn = torch.randint(before, (after - before,), generator=generator)
    return torch.cat([torch.arange(before), drawn])
