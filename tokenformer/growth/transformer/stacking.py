"""Stacking (Gong et al. 2019; G_stack, arXiv 2405.15319): layer l is copied to l + L, l + 2L, ...

Depth alone. The output of the last layer meets the first one again, so the function is not
preserved; Adam's moments are copied with the layers.
"""

from tokenformer.growth.origin import Origin
from tokenformer.growth.transformer.expansion import Expansion, Grown, in_layer, place_of


def stacking(expansion: Expansion) -> Grown:
    before, after = expansion.before, expansion.after
    for name in ("hidden_size", "intermediate_size", "num_key_value_heads"):
        old, new = getattr(before, name), getattr(after, name)
        if new != old:
            raise ValueError(
                f"{name}={new}: stacking deepens and does not widen; the model has {old}"
            )
    layers = stacked(before.num_hidden_layers, after.num_hidden_layers)
    origins = {}
    for name in expansion.names:
        layer, place = place_of(name)
        origins[name] = Origin(name if layer is None else in_layer(layers[layer], place))
    parameters = {name: expansion.placed(name, origin) for name, origin in origins.items()}
    return Grown(after, parameters, origins, exact=len(layers) == before.num_hidden_layers)


def stacked(before: int, after: int) -> list[int]:
    """For each new layer the old one it copies."""
    return [layer % before for layer in range(after)]
