"""How this package is installed: from a clone or from a wheel.

install_hint("vision")     # pip install -e ".[vision]", or the packages that the extra needs
recipe_folder()            # recipes/ of the clone, or the copy in the wheel
"""

import re
import shlex
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
RECIPES = "recipes"


def source_tree() -> Path | None:
    """Return the folder of the clone that this package runs from; None for an installed wheel."""
    root = PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() and (root / RECIPES).is_dir() else None


def recipe_folder() -> Path:
    """Return the folder of the recipes that come with this package."""
    return (source_tree() or PACKAGE) / RECIPES


def install_hint(extra: str) -> str:
    """Return the command that installs an extra of this package.

    It needs no package index that has this package: from a clone it installs the clone, from a
    wheel it names the packages that the extra requires.
    """
    root = source_tree()
    if root is not None:
        here = "." if root == Path.cwd() else str(root)
        return f'pip install -e "{here}[{extra}]"'
    return f"pip install {shlex.join(required_packages(extra))}"


def required_packages(extra: str) -> list[str]:
    """Return the requirements of an extra, as in the metadata of the installed package."""
    try:
        lines = requires("tokenformer") or []
    except PackageNotFoundError:  # copied rather than installed
        return [f"tokenformer[{extra}]"]
    split = [line.partition(";") for line in lines]
    of_extra = re.compile(rf"""\bextra\s*==\s*['"]{re.escape(extra)}['"]""")
    return [requirement.strip() for requirement, _, marker in split if of_extra.search(marker)]
