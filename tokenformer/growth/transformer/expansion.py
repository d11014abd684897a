"""One growth of a plain Transformer: from which weights to which sizes, and what came of it.

An `Expansion` is what every method of `methods.py` is given, a `Grown` what it returns.
"""

import copy
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenformer.growth.origin import Origin
from tokenformer.models.configuration import TransformerConfig
from tokenformer.models.seeds import named_seed

IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def place_of(name: str) -> tuple[int | None, str]:
    """The layer of a parameter, if it is in one, and its name there."""
    found = IN_LAYER.fullmatch(name)
    return (int(found[1]), found[2]) if found else (None, name)


def in_layer(layer: int | None, name: str) -> str:
    return name if layer is None else f"model.layers.{layer}.{name}"


@dataclass
class Grown:
    config: TransformerConfig
    parameters: dict[str, Tensor]
    origins: dict[str, Origin]
    exact: bool
    """Whether the larger model computes the same function, by the rule that made it."""


class Expansion:
    def __init__(
        self,
        model_class: Any,
        before: TransformerConfig,
        after: TransformerConfig,
        old: dict[str, Tensor],
        seed: int,
    ) -> None:
        self.model_class, self.before, self.after = model_class, before, after
        self.old, self.seed = old, seed
        with torch.device("meta"):
            self.blank = model_class(after)
        self.names = [name for name, _ in self.blank.named_parameters()]

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.old.values())).dtype

    @property
    def device(self) -> torch.device:
        return next(iter(self.old.values())).device

    @property
    def widens(self) -> bool:
        """Whether the residual stream does; with it the heads do, which keep their size."""
        return self.after.hidden_size != self.before.hidden_size

    def generator(self, name: str) -> torch.Generator:
        """What is drawn for one thing does not depend on what is drawn for another."""
        return torch.Generator().manual_seed(named_seed(self.seed, name))

    def fresh(self, name: str) -> Tensor:
        """The parameter as a new model of the larger size would begin with it."""
        path, _, parameter = name.rpartition(".")
        module = copy.deepcopy(self.blank.get_submodule(path)).to_empty(device="cpu")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(named_seed(self.seed, name))
            self.blank._init_weights(module)
        drawn: Tensor = getattr(module, parameter).detach()
        return drawn.to(self.device, self.dtype)

    def placed(self, name: str, origin: Origin, *, draw: bool = True) -> Tensor:
        """The old entries in their new places, scaled; others as `fresh`, or zero."""
        assert origin.name is not None
        old = self.old[origin.name]
        made = origin.scaled(old)
        new = origin.is_new(made.shape, made.device)
        return torch.where(new, self.fresh(name), made) if draw and new.any() else made
