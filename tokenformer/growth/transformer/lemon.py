"""LEMON (arXiv 2310.07999): replicas split their output unequally; exact at any width.

Heads and units of the feed-forward network are copied in a circle, and the replicas of one share
its output in parts a + b + ... = 1 that differ, which tells them apart for the optimizer.

The residual stream of d channels becomes D = k d + r: k copies of every channel, their readers
sharing unequally too, and r channels that change no norm but for its divisor. For a layer norm
these hold the mean of the others: it stays, the variance becomes k d / D of what it was, and the
norm gives sqrt(D / (k d)) times the old output on the copies, and zero on the r others. For an RMS
norm they hold zero, with the same outcome. The readers take the factor back; what they have in the
columns of the r others meets zeros, so it is drawn as in a new model. The norm's eps has to shrink
with the variance: `norm_eps` of the grown model is k d / D of the old one's. With that it is exact,
eps included; to a whole multiple of the width nothing of it happens.

Depth: identity layers, as in Net2Net.

With unequal shares the stream's gradient is no multiple of the old one, since the part that a norm
takes out of it is common to all replicas. `gradient_scale` of what writes to the stream is then the
share, which holds but for that part (2 to 30 % of the gradient's norm in a model of width 32);
everywhere else it is exact.
"""

import math

import torch

from tokenformer.growth.origin import MEAN, NEW
from tokenformer.growth.transformer.expansion import Expansion, Grown
from tokenformer.growth.transformer.widening import (
    Stream,
    circular,
    map_layer,
    share,
    spread,
    widen,
)
from tokenformer.models.configuration import TransformerConfig


def lemon(expansion: Expansion, *, unevenness: float = 0.5) -> Grown:
    """`unevenness` u: before they are made to sum to 1, shares are drawn from [1 - u, 1 + u]."""
    if not 0 <= unevenness < 1:
        raise ValueError(f"unevenness={unevenness} must be at least 0 and below 1")
    stream = padded_stream(expansion, unevenness)
    parameters, origins = widen(
        expansion,
        stream,
        lambda layer: map_layer(expansion, layer, circular, unevenness),
        spread(expansion.before.num_hidden_layers, expansion.after.num_hidden_layers),
    )
    options = expansion.after.to_dict()
    options["norm_eps"] = expansion.before.norm_eps / stream.gain**2
    return Grown(TransformerConfig.from_dict(options), parameters, origins, exact=True)


def padded_stream(expansion: Expansion, unevenness: float) -> Stream:
    before, after = expansion.before.hidden_size, expansion.after.hidden_size
    generator = expansion.generator("stream")
    copied = after // before * before
    index = torch.full((after,), MEAN if expansion.before.norm == "layer_norm" else NEW)
    index[:copied] = circular(before, copied, generator)
    shares = share(index, before, unevenness, generator)
    return Stream(index, shares, gain=math.sqrt(after / copied))
