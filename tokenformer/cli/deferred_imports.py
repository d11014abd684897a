"""Defers imports of transformers that most commands never use.

`import transformers` is lazy, but loading any model imports the compiler of torch, DTensor, FSDP,
scipy and accelerate: for one mask under vmap, tensor parallelism, the losses of object detectors,
models split over devices. That takes longer than torch itself.

Here the modules of transformers in `DEFERRED` get an `import` of their own, in which the names
listed there become `DeferredName`s. The first use of such a name imports it, and once its module is
loaded, by whoever, transformers gets the object itself. All other imports are as they were; in a
version of transformers that does not have an import listed here, nothing is deferred.
"""

import builtins
import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import resolve_name
from threading import RLock
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, Union

from tokenformer.cli.import_structure import cache_import_structure

DEFERRED: dict[str, tuple[str, ...]] = {
    "accelerate": ("PartialState", "dispatch_model"),
    "accelerate.hooks": ("AlignDevicesHook", "add_hook_to_module"),
    "accelerate.utils": (
        "extract_model_from_parallel",
        "get_balanced_memory",
        "get_max_memory",
        "infer_auto_device_map",
        "reduce",
    ),
    "accelerate.utils.modeling": ("clean_device_map", "get_max_layer_size"),
    "scipy.optimize": ("linear_sum_assignment",),
    "torch._dynamo._trace_wrapped_higher_order_op": ("TransformGetItemToIndex",),
    "torch._dynamo.eval_frame": ("OptimizedModule",),
    "torch.distributed._composable.fsdp": ("fully_shard",),
    "torch.distributed._functional_collectives": ("all_to_all_single_autograd", "wait_tensor"),
    "torch.distributed.checkpoint.hf_storage": (
        "HuggingFaceStorageReader",
        "HuggingFaceStorageWriter",
    ),
    "torch.distributed.fsdp": (
        "CPUOffloadPolicy",
        "FullyShardedDataParallel",
        "MixedPrecisionPolicy",
    ),
    "torch.distributed.fsdp.fully_sharded_data_parallel": ("FullyShardedDataParallel",),
    "torch.distributed.tensor": (
        "DTensor",
        "Partial",
        "Replicate",
        "Shard",
        "distribute_tensor",
    ),
    "torch.distributed.tensor._utils": ("compute_local_shape_and_global_offset",),
    "torch.distributed.tensor.placement_types": ("Shard", "_StridedShard"),
    "transformers.distributed.expert_parallel": ("apply_expert_parallelism",),
    "transformers.distributed.parallel_utils": ("ALL_PARALLEL_STYLES",),
    "transformers.distributed.tensor_parallel": (
        "apply_tensor_parallelism",
        "gather_state_dict_for_save",
        "get_kv_heads_per_rank",
        "verify_tp_plan",
    ),
}
"""Names by the module that they are imported from."""

COMPLETED_BY = {
    "transformers.distributed.parallel_utils": "transformers.distributed.tensor_parallel"
}
"""Where to import from instead: the registry of styles is filled by other modules."""


class DeferredName:
    """Stands for a name of a module that is not imported yet; using it imports the module."""

    def __init__(self, source: str, name: str) -> None:
        self._source, self._name = source, name

    def __repr__(self) -> str:
        return f"<deferred {self._source}.{self._name}>"

    def _resolve(self) -> Any:
        return getattr(importlib.import_module(self._source), self._name)

    def __getattr__(self, attribute: str) -> Any:
        inner = f"{self._source}.{self._name}"
        if inner not in sys.modules and attribute in DEFERRED.get(inner, ()):
            return deferred_name(inner, attribute)
        return getattr(self._resolve(), attribute)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._resolve()(*args, **kwargs)

    def __instancecheck__(self, instance: object) -> bool:
        # Before its module is loaded, a class has no instances.
        return self._source in sys.modules and isinstance(instance, self._resolve())

    def __subclasscheck__(self, subclass: type) -> bool:
        return self._source in sys.modules and issubclass(subclass, self._resolve())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._resolve(),)

    def __contains__(self, item: object) -> bool:
        return item in self._resolve()

    def __iter__(self) -> Any:
        return iter(self._resolve())

    def __getitem__(self, key: Any) -> Any:
        return self._resolve()[key]

    def __or__(self, other: Any) -> Any:
        # In an annotation, as if the name were written in quotes.
        return Union[self._name, other]  # noqa: UP007

    def __ror__(self, other: Any) -> Any:
        return Union[other, self._name]  # noqa: UP007


@cache
def deferred_name(source: str, name: str) -> DeferredName:
    return DeferredName(COMPLETED_BY.get(source, source), name)


def deferring_import(
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    """The `__import__` of the modules of transformers."""
    package = (globals or {}).get("__package__")
    source = resolve_name("." * level + name, package) if level else name
    found: dict[str, Any] = {}
    for each in fromlist or ():
        if each in DEFERRED.get(source, ()):
            deferred = deferred_name(source, each)
            found |= {} if deferred._source in sys.modules else {each: deferred}
    others = [each for each in fromlist or () if each not in found]
    if found and not others:
        return SimpleNamespace(**found)
    module = builtins.__import__(name, globals, locals, fromlist or (), level)
    if not found:
        return module
    return SimpleNamespace(**found, **{each: getattr(module, each) for each in others})


DEFERRING_BUILTINS = {**vars(builtins), "__import__": deferring_import}


LAZY = "torch._dynamo"
"""The compiler of torch, loaded on first use."""
MARKERS = ("allow_in_graph", "assume_constant_result")
"""Decorators of the compiler that return the function they are given, marked."""
DECORATORS = (*MARKERS, "disable")
LOADING = RLock()
PAUSING = ("torch", "transformers")
"""Large packages, whose imports are not deferred."""


class LazyModule(ModuleType):
    """The compiler of torch, until it is used. Many functions of torch and transformers are
    decorated for it. Its decorators have no effect before it is loaded, and are applied then."""

    waiting: list[Callable[[], Any]]
    """What applies the decorators; it is removed when the module starts to load."""

    def __getattr__(self, name: str) -> Any:
        with LOADING:
            if "waiting" in vars(self):
                if name in DECORATORS:
                    return partial(decorate_late, self, name)
                if f"{self.__name__}.{name}" in DEFERRED:
                    return deferred_name(self.__name__, name)
                load(self)
            elif isinstance(self, LazyModule):  # a circular import, within `load`
                raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self, name)


def load(module: LazyModule) -> None:
    """Run the code of the module, in place, and apply the decorators that wait for it."""
    spec, waiting = module.__spec__, vars(module).pop("waiting")
    assert spec is not None
    assert isinstance(spec.loader, LazyLoader)
    spec.loader = module.__loader__ = spec.loader.loader
    module.__path__ = spec.submodule_search_locations or []
    spec.loader.exec_module(module)
    module.__class__ = ModuleType  # type: ignore[assignment]
    for decorate in waiting:
        decorate()


def decorate_late(
    compiler: ModuleType, decorator: str, function: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Decorate a function once the compiler is loaded; before, the decorator has no effect."""

    def decorated() -> Any:
        return getattr(compiler, decorator)(function, *args, **kwargs)

    if function is None:  # with options only: @disable(recursive=False)
        return lambda function: decorate_late(compiler, decorator, function, *args, **kwargs)
    target = [function]

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return target[0](*args, **kwargs)

    with LOADING:
        if isinstance(compiler, LazyModule) and not isinstance(function, FunctionType):
            load(compiler)  # a class or an nn.Module, which becomes another object
        if not isinstance(compiler, LazyModule):
            return decorated()
        if decorator in MARKERS:
            compiler.waiting.append(decorated)
            return function
        compiler.waiting.append(lambda: target.__setitem__(0, decorated()))
        return call


class LazyLoader(Loader):
    """Like `importlib.util.LazyLoader`, for a package: `import` alone does not load it, but an
    import of one of its modules does, because that asks for `__path__`."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        del module.__path__
        vars(module)["waiting"] = []
        module.__class__ = LazyModule


class DeferringLoader(Loader):
    """Loads a module by its own loader. In a module of transformers imports are deferred; if names
    of the module were deferred elsewhere, they are replaced."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self.loader
        if is_deferring(module.__name__):
            module.__dict__["__builtins__"] = DEFERRING_BUILTINS
        with paused_collector():
            self.loader.exec_module(module)
        if module.__name__ in DEFERRED:
            replace_deferred(module)
        if module.__name__ == "transformers.utils.import_utils":
            cache_import_structure(module)


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the garbage collector. What is imported stays, and looking at it again and again takes
    a tenth of the time of the imports."""
    if not gc.isenabled():
        yield
        return
    before_torch = "torch" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if before_torch and "torch" in sys.modules:
            gc.freeze()


def is_deferring(name: str) -> bool:
    return name.startswith(("accelerate.", "huggingface_hub.", "transformers."))


def replace_deferred(source: ModuleType) -> None:
    """Replace the deferred names of a module that has been loaded by what they stand for."""
    for name in filter(is_deferring, list(sys.modules)):
        namespace = getattr(sys.modules[name], "__dict__", {})
        for bound, value in list(namespace.items()):
            if type(value) is DeferredName and value._source == source.__name__:
                namespace[bound] = getattr(source, value._name)


class DeferringFinder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not (name in DEFERRED or name in PAUSING or name == LAZY or is_deferring(name)):
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            spec.loader = (LazyLoader if name == LAZY else DeferringLoader)(spec.loader)
        return spec


def defer_imports() -> None:
    """Defer the imports of `DEFERRED` from now on, in modules that are not loaded yet."""
    if not any(isinstance(finder, DeferringFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, DeferringFinder())
