"""Block padding: the old matrix in the top-left block, newly initialized parameters elsewhere.

The TokenFormer paper calls this Net2Net. It is not exact: every layer also reads the new channels,
and they change the statistics of every norm. New layers are newly initialized.
"""

from torch import Tensor

from tokenformer.growth.parameter_mapping import ParameterMapping, extended_index
from tokenformer.growth.transformer.expansion import Expansion, GrownWeights


def block_padding(expansion: Expansion) -> GrownWeights:
    parameters: dict[str, Tensor] = {}
    mappings: dict[str, ParameterMapping] = {}
    for name in expansion.names:
        if name not in expansion.old:  # in a new layer
            parameters[name], mappings[name] = expansion.initialized(name), ParameterMapping(None)
            continue
        before, after = expansion.old[name].shape, expansion.meta_model.get_parameter(name).shape
        maps = [extended_index(old, new) for old, new in zip(before, after, strict=True)]
        mappings[name] = ParameterMapping(name, *maps)
        parameters[name] = expansion.map_old(name, mappings[name])
    return GrownWeights(
        expansion.after, parameters, mappings, exact=expansion.before == expansion.after
    )
