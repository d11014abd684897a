"""LEMON (arXiv 2310.07999): replicas split their output unequally; exact at any width.

Heads and units of the feed-forward network are copied cyclically. The replicas of a unit share its
output in unequal parts a + b + ... = 1, which breaks the symmetry between them.

The residual stream grows from d to D = k d + r channels: k copies of every channel, which their
readers weight unequally too, and r padding channels. For a layer norm the padding holds the mean of
the other channels, for an RMS norm zero. The mean stays, the variance becomes k d / D of the old
one, and the norm outputs sqrt(D / (k d)) times the old output on the copies and zero on the
padding. The readers divide by this factor; their columns for the padding multiply zeros, so they
are initialized as in a new model. `norm_eps` is multiplied by k d / D, which makes growth exact
with eps too. For whole multiples of the width there is no padding.

Depth: identity layers, as in Net2Net.

With unequal shares the gradient of the residual stream is not a multiple of the old one, because a
norm removes a component that all replicas have in common. `gradient_scale` of the matrices that
write to the stream is the share, which is exact except for that component (2 to 30 % of the
gradient's norm in a model of width 32). Elsewhere it is exact.
"""

import math

import torch

from tokenformer.growth.parameter_mapping import MEAN, NEW
from tokenformer.growth.transformer.expansion import Expansion, GrownWeights
from tokenformer.growth.transformer.widening import (
    StreamReplicas,
    cyclic,
    interleave,
    layer_replicas,
    replica_shares,
    widen,
)
from tokenformer.models.configuration import TransformerConfig


def lemon(expansion: Expansion, *, unevenness: float = 0.5) -> GrownWeights:
    """Grow by LEMON. Shares are sampled from [1 - u, 1 + u], u = `unevenness`, then normalized."""
    if not 0 <= unevenness < 1:
        raise ValueError(f"unevenness={unevenness} must be at least 0 and below 1")
    stream = padded_stream(expansion, unevenness)
    parameters, mappings = widen(
        expansion,
        stream,
        lambda layer: layer_replicas(expansion, layer, cyclic, unevenness),
        interleave(expansion.before.num_hidden_layers, expansion.after.num_hidden_layers),
    )
    options = expansion.after.to_dict()
    options["norm_eps"] = expansion.before.norm_eps / stream.gain**2
    return GrownWeights(TransformerConfig.from_dict(options), parameters, mappings, exact=True)


def padded_stream(expansion: Expansion, unevenness: float) -> StreamReplicas:
    before, after = expansion.before.hidden_size, expansion.after.hidden_size
    generator = expansion.generator("stream")
    copied = after // before * before
    index = torch.full((after,), MEAN if expansion.before.norm == "layer_norm" else NEW)
    index[:copied] = cyclic(before, copied, generator)
    shares = replica_shares(index, before, unevenness, generator)
    return StreamReplicas(index, shares, gain=math.sqrt(after / copied))
