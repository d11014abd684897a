"""Registers our models with transformers' Auto classes, without importing transformers.

The modules below register their classes when they are imported. But `import tokenformer` followed
by `AutoModelForCausalLM.from_pretrained(...)` imports none of them, and importing them for every
`tokenformer --help` would take seconds. So they are imported right after transformers' own auto
modules (their triggers): at once if those are loaded, else by an import hook.

`transformers.modeling_layers`, which every model imports, itself imports the auto modules before it
is complete, and our modules need it complete. So they wait until no trigger is partially loaded.
Our backbone, which imports it and which our models import, is a trigger for the same reason.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import ClassVar

CONFIGURATION_MODULES = ("tokenformer.models.configuration",)
MODEL_MODULES = (
    "tokenformer.models.language",
    "tokenformer.models.vision",
    "tokenformer.models.quantization",
)
REGISTERED_AFTER = {
    "transformers.models.auto.configuration_auto": CONFIGURATION_MODULES,
    "transformers.models.auto.modeling_auto": MODEL_MODULES,
    "transformers.modeling_layers": MODEL_MODULES,
    "transformers.models.auto.image_processing_auto": ("tokenformer.models.image_processing",),
    "tokenformer.models.backbone": MODEL_MODULES,
}


class _TriggerLoader(importlib.abc.Loader):
    """Loads a trigger by its own loader, then imports our modules."""

    loading: ClassVar[set[str]] = set()

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loading.add(module.__name__)
        try:
            self.loader.exec_module(module)
        finally:
            self.loading.remove(module.__name__)
        if not self.loading:
            _import_triggered()


class _TriggerFinder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in REGISTERED_AFTER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _TriggerLoader(spec.loader)
        return spec


def _import_triggered() -> None:
    for trigger, modules in REGISTERED_AFTER.items():
        if trigger in sys.modules:
            for module in modules:
                importlib.import_module(module)


def register_when_imported() -> None:
    """Register with the auto modules that are loaded, and with the others when they are."""
    _import_triggered()
    if not any(isinstance(finder, _TriggerFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TriggerFinder())
