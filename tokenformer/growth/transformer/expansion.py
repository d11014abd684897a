"""Input and output of the growth methods in `methods.py`.

Every method takes an `Expansion`, the old weights and the new sizes, and returns `GrownWeights`.
"""

import copy
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenformer.growth.parameter_mapping import ParameterMapping
from tokenformer.models.configuration import TransformerConfig
from tokenformer.models.language import TransformerForCausalLM
from tokenformer.models.seeds import named_seed

LAYER_PARAMETER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def split_name(name: str) -> tuple[int | None, str]:
    """Split a parameter name into its layer number (None outside the layers) and the rest."""
    match = LAYER_PARAMETER.fullmatch(name)
    return (int(match[1]), match[2]) if match else (None, name)


def full_name(layer: int | None, name: str) -> str:
    """The inverse of `split_name`."""
    return name if layer is None else f"model.layers.{layer}.{name}"


@dataclass
class GrownWeights:
    config: TransformerConfig
    parameters: dict[str, Tensor]
    mappings: dict[str, ParameterMapping]
    exact: bool
    """Whether the method preserves the function."""


class Expansion:
    """The old weights, the old and new configuration, and the new model on the meta device."""

    def __init__(
        self,
        model_class: type[TransformerForCausalLM],
        before: TransformerConfig,
        after: TransformerConfig,
        old: dict[str, Tensor],
        seed: int,
    ) -> None:
        self.model_class, self.before, self.after = model_class, before, after
        self.old, self.seed = old, seed
        with torch.device("meta"):
            self.meta_model = model_class(after)
        self.names = [name for name, _ in self.meta_model.named_parameters()]

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.old.values())).dtype

    @property
    def device(self) -> torch.device:
        return next(iter(self.old.values())).device

    @property
    def widens(self) -> bool:
        """Whether the hidden size grows, and with it the number of heads."""
        return self.after.hidden_size != self.before.hidden_size

    def generator(self, name: str) -> torch.Generator:
        """Return a random generator seeded by `name`."""
        return torch.Generator().manual_seed(named_seed(self.seed, name))

    def initialized(self, name: str) -> Tensor:
        """Return the parameter as initialized in a new model of the larger size."""
        path, _, parameter = name.rpartition(".")
        module = copy.deepcopy(self.meta_model.get_submodule(path)).to_empty(device="cpu")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(named_seed(self.seed, name))
            self.meta_model._init_weights(module)
        tensor: Tensor = getattr(module, parameter).detach()
        return tensor.to(self.device, self.dtype)

    def map_old(self, name: str, mapping: ParameterMapping, *, initialize: bool = True) -> Tensor:
        """Return the mapped old entries; new ones are initialized, or zero."""
        assert mapping.source is not None
        old = self.old[mapping.source]
        made = mapping.apply(old)
        new = mapping.is_new(made.shape, made.device)
        return torch.where(new, self.initialized(name), made) if initialize and new.any() else made
