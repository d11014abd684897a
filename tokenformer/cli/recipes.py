"""The recipes that come with this package, by name: `tokenformer train text`.

find_recipe("text")        # .../recipes/laptop/text.yaml
find_recipe("my.yaml")     # a path stays as it is
"""

from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from textwrap import wrap

from tokenformer.errors import InputError
from tokenformer.installation import recipe_folder
from tokenformer.paths import exists, expand_user

SUFFIXES = (".yaml", ".yml")
SUMMARY = ("Claim", "Cost")
"""Comment lines at the top of a recipe that `--list` shows."""
INDENT, WIDTH = 8, 100


def find_recipe(name: str) -> Path:
    """Return the recipe of that name, or `name` itself if it is a path."""
    path = expand_user(name)
    if is_file(path):
        return path
    recipes = {recipe_name(recipe): recipe for recipe in packaged_recipes()}
    found = [full for full in recipes if name in (full, full.rpartition("/")[2])]
    if len(found) == 1:
        return recipes[found[0]]
    if len(found) > 1:
        raise InputError(f"{name} is the name of several recipes; give {' or '.join(found)}")
    if exists(path) or path.suffix in SUFFIXES or "/" in name:
        return path
    stems = [recipe.stem for recipe in recipes.values()]
    near = get_close_matches(name, stems, n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    hint += "`tokenformer train --list` lists the recipes"
    raise InputError(f"no recipe or file {name}; {hint}")


def packaged_recipes() -> list[Path]:
    return sorted(recipe_folder().glob("*/*.yaml"))


def recipe_name(recipe: Path) -> str:
    return f"{recipe.parent.name}/{recipe.stem}"


def is_file(path: Path) -> bool:
    return exists(path) and path.is_file()


def recipe_list() -> str:
    """Return what `tokenformer train --list` prints: the name, claim and cost of every recipe."""
    lines = [
        "Train a recipe with `tokenformer train NAME`; its file says how to prepare the data.",
        f"The files are in {recipe_folder()}.",
    ]
    folder = None
    for recipe in packaged_recipes():
        if recipe.parent != folder:
            folder = recipe.parent
            lines += ["", f"{folder.name}/"]
        lines += [f"    {recipe.stem}", *summary(recipe)]
    return "\n".join(lines) + "\n"


def summary(recipe: Path) -> Iterator[str]:
    """Yield the claim and the cost from the comments at the top of a recipe, indented."""
    for topic, text in header(recipe):
        if topic in SUMMARY:
            shown = text if topic == "Claim" else f"{topic}: {text}"
            yield from (" " * INDENT + part for part in wrap(shown, WIDTH - INDENT))


def header(recipe: Path) -> Iterator[tuple[str, str]]:
    """Yield the comments at the top of a recipe as (topic, text)."""
    for line in recipe.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            return
        topic, _, text = line.removeprefix("#").strip().partition(" ")
        yield topic, text.strip()


def header_line(recipe: Path, wanted: str) -> str:
    """Return the comment on a topic at the top of a recipe; empty if it has none."""
    return next((text for topic, text in header(recipe) if topic == wanted), "")
