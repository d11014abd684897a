"""Makes transformers' Auto classes know our models, without importing transformers for it.

The modules below register their classes when they are imported. But a user who says `import
tokenformer` and then `AutoModelForCausalLM.from_pretrained(...)` imports none of them, and
importing them for every `tokenformer --help` would cost seconds. So they are imported right after
transformers' own auto modules: at once if those are loaded, else by an import hook.

`transformers.modeling_layers`, which every model of transformers imports, itself imports the auto
modules halfway, and ours need it whole. So the followers wait until no leader is half loaded; our
own backbone, which imports it and which our models import, is a leader for that reason.
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
FOLLOWERS = {
    "transformers.models.auto.configuration_auto": CONFIGURATION_MODULES,
    "transformers.models.auto.modeling_auto": MODEL_MODULES,
    "transformers.modeling_layers": MODEL_MODULES,
    "transformers.models.auto.image_processing_auto": ("tokenformer.models.image_processing",),
    "tokenformer.models.backbone": MODEL_MODULES,
}


class _ThenImport(importlib.abc.Loader):
    """Loads a leader by its own loader, then imports the followers."""

    half_loaded: ClassVar[set[str]] = set()

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.half_loaded.add(module.__name__)
        try:
            self.loader.exec_module(module)
        finally:
            self.half_loaded.remove(module.__name__)
        if not self.half_loaded:
            _import_followers()


class _AutoModuleFinder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in FOLLOWERS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenImport(spec.loader)
        return spec


def _import_followers() -> None:
    for leader, followers in FOLLOWERS.items():
        if leader in sys.modules:
            for follower in followers:
                importlib.import_module(follower)


def register_when_imported() -> None:
    """Follow those auto modules that are loaded now, and the others when they are."""
    _import_followers()
    if not any(isinstance(finder, _AutoModuleFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AutoModuleFinder())
