"""Stacking (Gong et al. 2019; G_stack, arXiv 2405.15319): layer l is copied to l + L, l + 2L, ...

Only depth grows. Not exact, because the output of the last layer is fed to the first layer again.
Adam's moments are copied with the layers.
"""

from tokenformer.growth.parameter_mapping import ParameterMapping
from tokenformer.growth.transformer.expansion import Expansion, GrownWeights, full_name, split_name


def stacking(expansion: Expansion) -> GrownWeights:
    before, after = expansion.before, expansion.after
    for name in ("hidden_size", "intermediate_size", "num_key_value_heads"):
        old, new = getattr(before, name), getattr(after, name)
        if new != old:
            raise ValueError(
                f"{name}={new}: stacking changes only the depth; the model has {name}={old}"
            )
    layers = stacked_layers(before.num_hidden_layers, after.num_hidden_layers)
    mappings = {}
    for name in expansion.names:
        layer, suffix = split_name(name)
        mappings[name] = ParameterMapping(
            name if layer is None else full_name(layers[layer], suffix)
        )
    parameters = {name: expansion.map_old(name, mapping) for name, mapping in mappings.items()}
    return GrownWeights(after, parameters, mappings, exact=len(layers) == before.num_hidden_layers)


def stacked_layers(before: int, after: int) -> list[int]:
    """Return the old layer that each new layer copies."""
    return [layer % before for layer in range(after)]
