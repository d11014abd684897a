"""Block padding: the old matrix in the top-left block, fresh parameters in the three others.

It is what the TokenFormer paper writes under the name of Net2Net. The old model is still there, but
every layer also reads fresh channels and every norm divides by their deviation too, so the function
is not preserved. New layers are fresh; the fresh parameters are those a new model begins with.
"""

from torch import Tensor

from tokenformer.growth.origin import Origin, added_rows
from tokenformer.growth.transformer.expansion import Expansion, Grown


def block_padding(expansion: Expansion) -> Grown:
    parameters: dict[str, Tensor] = {}
    origins: dict[str, Origin] = {}
    for name in expansion.names:
        if name not in expansion.old:  # of a new layer
            parameters[name], origins[name] = expansion.fresh(name), Origin(None)
            continue
        before, after = expansion.old[name].shape, expansion.blank.get_parameter(name).shape
        maps = [added_rows(old, new) for old, new in zip(before, after, strict=True)]
        origins[name] = Origin(name, *maps)
        parameters[name] = expansion.placed(name, origins[name])
    return Grown(expansion.after, parameters, origins, exact=expansion.before == expansion.after)
