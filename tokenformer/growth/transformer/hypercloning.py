"""HyperCloning (arXiv 2409.12903): every matrix is tiled, W.repeat(n_out, n_in) / n_in.

Widths grow by whole factors, heads multiply, and the size of a head stays. Norm vectors and
embeddings are repeated undivided; the head is divided, where it is tied by the final norm. Exact.

Without noise the tiles get equal gradients and stay equal for ever. `noise` adds what cancels over
the input tiles (+N on one, -N on the other where there are two): exact still, and the tiles part.
"""

from tokenformer.growth.transformer.expansion import Expansion, Grown
from tokenformer.growth.transformer.widening import (
    Stream,
    check_noise,
    circular,
    map_layer,
    share,
    widen,
)

WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def hypercloning(expansion: Expansion, *, noise: float = 0.0) -> Grown:
    check_noise(noise)
    before, after = expansion.before, expansion.after
    for name in WIDTHS:
        old, new = getattr(before, name), getattr(after, name)
        if new % old:
            raise ValueError(f"{name}={new}: hypercloning needs a whole multiple of {old}")
    if after.num_hidden_layers != before.num_hidden_layers:
        raise ValueError(
            f"num_hidden_layers={after.num_hidden_layers}: hypercloning widens and does not "
            f"deepen; the model has {before.num_hidden_layers}"
        )
    generator = expansion.generator("stream")
    index = circular(before.hidden_size, after.hidden_size, generator)
    parameters, origins = widen(
        expansion,
        Stream(index, share(index, before.hidden_size, 0.0, generator)),
        lambda layer: map_layer(expansion, layer, circular),
        list(range(before.num_hidden_layers)),
        noise,
    )
    return Grown(after, parameters, origins, exact=True)
