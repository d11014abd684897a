"""Routers of a layer that grows: the number of active groups stays, the choice becomes larger.

The new groups must not take the place of old ones at growth, or the output would change, and must
not stay unused for ever. So their biases start below all scores, and load balancing raises them
until rows choose them: larger, not slower.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tokenformer.growth.parameter_mapping import ParameterMapping, extended_index
from tokenformer.growth.tokens.token_counts import TokenCounts, token_counts
from tokenformer.layers.pattention import Pattention
from tokenformer.layers.routed_pattention import RoutedPattention
from tokenformer.models.configuration import TokenConfig
from tokenformer.models.seeds import named_seed

CopyTensor = Callable[[str, Tensor], tuple[Tensor, ParameterMapping]]
INITS = ("zero", "random", "zero_value")
MARGIN = 6.0
"""How far new groups start below the lowest old bias, in standard deviations of a score."""


class RouterGrowth:
    """Makes the tensors of grown routers, and all others by `copy`."""

    def __init__(self, layers: Mapping[str, Pattention], copy: CopyTensor, seed: int) -> None:
        self.layers = {
            name: layer for name, layer in layers.items() if isinstance(layer, RoutedPattention)
        }
        self.copy, self.seed = copy, seed
        self.read: Callable[[str], Tensor] | None = None
        """Returns a tensor of the old model."""

    def __call__(self, name: str, tensor: Tensor) -> tuple[Tensor, ParameterMapping]:
        layer, _, kind = name.rpartition(".router.")
        module = self.layers.get(layer)
        if module is None or module.num_groups == len(tensor):
            return self.copy(name, tensor)
        old, rows = len(tensor), extended_index(len(tensor), module.num_groups)
        grown = tensor.new_empty(module.num_groups, *tensor.shape[1:])
        grown[:old] = tensor
        if kind == "weight":
            generator = torch.Generator().manual_seed(named_seed(self.seed, name))
            fresh = torch.randn(grown[old:].shape, generator=generator)
            grown[old:] = (fresh * tensor.float().square().mean().sqrt().cpu()).to(tensor)
        else:
            grown[old:] = tensor.min() - MARGIN * self.spread(f"{layer}.router.weight")
        return grown, ParameterMapping(name, rows)

    def spread(self, weight: str) -> float:
        """Return the standard deviation of the scores of isotropic rows."""
        owner = self.layers[weight.removesuffix(".router.weight")].router
        if "weight" not in owner._parameters:
            return 1.0
        assert self.read is not None
        return self.read(weight).float().square().sum(1).mean().sqrt().item()


def check_routed_growth(config: TokenConfig, sizes: TokenCounts, init: str) -> None:
    """Raise if a routed layer cannot grow to its size in `sizes`."""
    for (projection, layer), before in token_counts(config).items():
        routed = config.active(projection, layer) is not None
        if not routed or sizes[projection, layer] == before:
            continue
        name = f"{projection} of layer {layer}"
        if init not in INITS:
            raise ValueError(
                f"init={init!r} changes old tokens, which {name} does not support because it is "
                f"routed; use {' or '.join(INITS)}"
            )
        if before % config.group_size:
            raise ValueError(
                f"{name} has {before} tokens, and its last group of group_size="
                f"{config.group_size} is not full; only routed layers with full groups can grow"
            )
        if not config.balance_rate:
            raise ValueError(
                f"balance_rate=0: new groups of {name} would never be chosen; set balance_rate, "
                "such as 0.01, in the config.json of the model, or in Python in model.config and "
                "its routers"
            )
