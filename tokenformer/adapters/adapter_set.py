"""The adapters of one model, chosen per sequence of a batch.

    adapters = AdapterSet(model)
    adapters.load("python", AdapterFolder.read(folder))
    with adapters.select(["python", None, "sql"]) as model:
        logits = model(input_ids).logits        # a batch of three, the second without adapter

The base is not changed: the adapters are attached to a copy of its modules that has the same
weights in memory. So a batch without adapters runs the base itself, with native decoding.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

from tokenformer.adapters.adapter_folder import AdapterFolder
from tokenformer.adapters.adapter_layer import BASE, SampleAdapters
from tokenformer.errors import AdapterError


class AdapterSet:
    """Not thread-safe: load, remove and select in one thread."""

    def __init__(self, base: nn.Module) -> None:
        self.base = base
        self.adapted: Any = None
        """The copy with the adapters, a `PeftModel`; None without adapters."""
        self.mixes = True
        """Whether sequences of a batch can have different adapters."""
        self.names: dict[str, str] = {}
        """Names in peft by name: peft's are attributes of modules, so `type` or `a.b` cannot be."""
        self.loaded = 0
        self.samples = SampleAdapters([])

    def load(self, name: str, adapter: AdapterFolder) -> None:
        """Load an adapter; if it does not fit, nothing has changed."""
        if name in self.names:
            raise AdapterError(f"there is an adapter {name!r} already")
        own = f"adapter{self.loaded}"
        self.loaded += 1
        self.adapted = adapter.attach(self.adapted or self.copy_base(), own)
        self.names[name] = own
        self.update()

    def copy_base(self) -> nn.Module:
        model = share_weights(self.base)
        # Hashed once, not for every adapter: these weights do not change.
        model.known_fingerprints = {}  # type: ignore[assignment]
        return model

    def remove(self, name: str) -> None:
        """Remove an adapter and free its weights."""
        own = self.names.pop(name)
        if self.names:
            tuner = self.adapted.base_model
            if own in tuner.active_adapters:
                tuner.set_adapter(next(iter(self.names.values())), inference_mode=True)
            self.adapted.delete_adapter(own)
        else:
            self.adapted = None
        self.update()

    def update(self) -> None:
        self.samples = SampleAdapters([])
        modules = () if self.adapted is None else self.adapted.modules()
        self.mixes = not any(map(cannot_mix, modules))

    @contextmanager
    def select(self, names: Sequence[str | None]) -> Iterator[Any]:
        """Return the model for a batch whose sequences have these adapters, None for none. All must
        have the same if the adapters cannot mix."""
        if not any(names):
            yield self.base
            return
        own = [self.names[name] if name else BASE for name in names]
        tuner = self.adapted.base_model
        if self.mixes:
            if self.samples != own:
                self.samples = SampleAdapters(own)  # keeps their tokens for the next step
            with tuner._enable_peft_forward_hooks(adapter_names=self.samples):
                yield tuner.model
        elif len(set(own)) == 1:
            if tuner.active_adapters != own[:1]:
                tuner.set_adapter(own[0], inference_mode=True)
            yield tuner.model
        else:
            raise ValueError(
                "LoRA on parameters or with DoRA, and adapters with modules_to_save, cannot mix in "
                "a batch"
            )


def cannot_mix(module: nn.Module) -> bool:
    """Whether peft has no mixed batches for a layer. For modules that an adapter replaces it has
    them for some types, and only if all adapters replace the same ones."""
    if isinstance(module, ParamWrapper | AuxiliaryTrainingWrapper):
        return True
    return isinstance(module, LoraLayer) and any(module.use_dora.values())


def share_weights(model: nn.Module) -> nn.Module:
    """Return a copy of a model that has the same weights in memory."""
    return copy.deepcopy(
        model, {id(part): part for part in chain(model.parameters(), model.buffers())}
    )
