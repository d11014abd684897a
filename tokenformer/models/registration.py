"""Registers our models with transformers' Auto classes and our adapters with peft, on import.

The modules below register their classes when they are imported. But `import tokenformer` followed
by `AutoModelForCausalLM.from_pretrained(...)` imports none of them, and importing them for every
`tokenformer --help` would take seconds. So they are imported right after transformers' own auto
modules (their triggers): at once if those are loaded, else by an import hook.

`transformers.modeling_layers`, which every model imports, itself imports the auto modules before it
is complete, and our modules need it complete. So they wait until no trigger is partially loaded.
Our backbone, which imports it and which our models import, is a trigger for the same reason, as are
the modules that the vision-language model imports.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

Triggers = dict[str, tuple[str, ...]]
"""Our modules by the module after which they are imported."""

CONFIGURATION_MODULES = ("tokenformer.models.configuration",)
IMAGE_TEXT_CONFIGURATION = ("tokenformer.models.image_text_configuration",)
MODEL_MODULES = (
    "tokenformer.models.language",
    "tokenformer.models.vision",
    "tokenformer.models.quantization",
)
IMAGE_TEXT_MODULES = ("tokenformer.models.image_text",)
PARALLEL_MODULES = ("tokenformer.models.token_parallel",)
REGISTERED_AFTER: Triggers = {
    "transformers.models.auto.configuration_auto": CONFIGURATION_MODULES,
    "transformers.models.auto.modeling_auto": MODEL_MODULES,
    "transformers.modeling_layers": MODEL_MODULES,
    "transformers.models.auto.image_processing_auto": ("tokenformer.models.image_processing",),
    "transformers.models.auto.processing_auto": ("tokenformer.models.image_text_processing",),
    "tokenformer.models.configuration": IMAGE_TEXT_CONFIGURATION,
    "tokenformer.models.backbone": MODEL_MODULES,
    "tokenformer.models.language": IMAGE_TEXT_MODULES,
    "tokenformer.models.vision": IMAGE_TEXT_MODULES,
}
STYLE_REGISTERED_AFTER: Triggers = {
    "transformers.distributed.tensor_parallel": PARALLEL_MODULES,
    "transformers.integrations.tensor_parallel": PARALLEL_MODULES,
}
"""Separate, because transformers loads these modules while it loads others that our models need."""

ADAPTERS_REGISTERED_AFTER: Triggers = {"peft": ("tokenformer.models.adapter_registration",)}
"""Separate, because peft finishes importing long after transformers."""


class _TriggerLoader(importlib.abc.Loader):
    """Loads a trigger by its own loader, then imports our modules."""

    def __init__(self, loader: importlib.abc.Loader, finder: "_TriggerFinder") -> None:
        self.loader = loader
        self.finder = finder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:  # importlib.resources and pkgutil ask it for files
            module.__loader__ = spec.loader = self.loader
        loading = self.finder.loading
        loading.add(module.__name__)
        try:
            self.loader.exec_module(module)
        finally:
            loading.remove(module.__name__)
        if not loading:
            self.finder.import_triggered()


class _TriggerFinder(importlib.abc.MetaPathFinder):
    def __init__(self, triggers: Triggers) -> None:
        self.triggers = triggers
        self.loading: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.triggers:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _TriggerLoader(spec.loader, self)
        return spec

    def import_triggered(self) -> None:
        for trigger, modules in self.triggers.items():
            if trigger in sys.modules:
                for module in modules:
                    importlib.import_module(module)


_FINDERS = [
    _TriggerFinder(triggers)
    for triggers in (REGISTERED_AFTER, STYLE_REGISTERED_AFTER, ADAPTERS_REGISTERED_AFTER)
]


def register_when_imported() -> None:
    """Register with the auto modules that are loaded, and with the others when they are."""
    for finder in _FINDERS:
        finder.import_triggered()
        if finder not in sys.meta_path:
            sys.meta_path.insert(0, finder)
