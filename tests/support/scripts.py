"""Scripts outside of the package, such as studies, loaded as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def load_script(path: Path, name: str) -> ModuleType:
    """Load the file at `path` as module `name`, by which processes that unpickle find it."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
