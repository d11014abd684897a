"""HyperCloning (arXiv 2409.12903): every matrix is tiled, W.repeat(n_out, n_in) / n_in.

Widths grow by whole factors; there are more heads of the same size. Norm vectors and embeddings are
repeated without division. The head is divided by n_in, or the final norm if embeddings are tied.
Exact.

Without noise the tiles get equal gradients and stay equal. `noise` adds noise that cancels over the
input tiles (+N on one, -N on the other if there are two): still exact, and the tiles diverge.
"""

from tokenformer.growth.transformer.expansion import Expansion, GrownWeights
from tokenformer.growth.transformer.widening import (
    StreamReplicas,
    check_noise,
    cyclic,
    layer_replicas,
    replica_shares,
    widen,
)

WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def hypercloning(expansion: Expansion, *, noise: float = 0.0) -> GrownWeights:
    check_noise(noise)
    before, after = expansion.before, expansion.after
    for name in WIDTHS:
        old, new = getattr(before, name), getattr(after, name)
        if new % old:
            raise ValueError(f"{name}={new}: hypercloning needs a whole multiple of {old}")
    if after.num_hidden_layers != before.num_hidden_layers:
        raise ValueError(
            f"num_hidden_layers={after.num_hidden_layers}: hypercloning changes only the width; "
            f"the model has {before.num_hidden_layers} layers"
        )
    generator = expansion.generator("stream")
    index = cyclic(before.hidden_size, after.hidden_size, generator)
    parameters, mappings = widen(
        expansion,
        StreamReplicas(index, replica_shares(index, before.hidden_size, 0.0, generator)),
        lambda layer: layer_replicas(expansion, layer, cyclic),
        list(range(before.num_hidden_layers)),
        noise,
    )
    return GrownWeights(after, parameters, mappings, exact=True)
