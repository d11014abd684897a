"""Find and check the data and the initial model of a run, before torch is imported.

A relative path in a recipe is looked up in the working folder, in the recipe's folder and in the
folder that contains `recipes/`, so that the recipes of a clone work from any folder. A path on the
command line is relative to the working folder. The run records absolute paths, which a resumed run
uses.
"""

import difflib
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tokenformer.data.corpus import Corpus, Split
from tokenformer.data.examples import ExampleSplit, open_split
from tokenformer.data.image_sources import DIGITS
from tokenformer.errors import DataError
from tokenformer.installation import PACKAGE, RECIPES
from tokenformer.models import presets
from tokenformer.paths import closest_path, exists, expand_user, is_local, missing_message
from tokenformer.train.options import ModelOptions, OptimizerOptions, Recipe
from tokenformer.train.recipe import read_mapping
from tokenformer.train.reporters import check_reporters
from tokenformer.train.stages import plan

TextSplit = Split | ExampleSplit
TRAIN, VALIDATION = "train", "validation"
PRESETS = {
    ("tokenformer", True): presets.TOKENFORMER_PRESETS,
    ("transformer", True): presets.TRANSFORMER_PRESETS,
    ("tokenformer", False): presets.VISION_TOKENFORMER_PRESETS,
    ("transformer", False): presets.VISION_TRANSFORMER_PRESETS,
}
"""By family, and whether the data is text."""


def resolve_paths(
    recipe: Recipe, file: Path, record: dict[str, Any] | None, report: Callable[[str], None]
) -> Recipe:
    """Return the recipe with absolute paths; `report` gets a line for each that is not in the
    working folder. A path that is not found is left: it is a hub name or a mistake."""
    written = read_mapping(file)

    def find(section: str, name: str, value: str | None) -> str | None:
        if value is None or value == DIGITS:
            return value
        in_recipe = (written.get(section) or {}).get(name) == value
        recorded = ((record or {}).get(section) or {}).get(name)
        for place, folder in enumerate(candidates(value, file if in_recipe else None, recorded)):
            if exists(folder) and folder.is_dir():
                if place > 0:
                    report(
                        f"{section}.{name}: {value} is not in the working folder; using {folder}"
                    )
                return str(folder.resolve())
        return value

    data = replace(
        recipe.data,
        corpus=find("data", "corpus", recipe.data.corpus),
        images=find("data", "images", recipe.data.images),
        image_text=find("data", "image_text", recipe.data.image_text),
    )
    start = find("model", "start_from", recipe.model.start_from)
    if start is not None and exists(Path(start) / "model" / "config.json"):
        start = str(Path(start) / "model")  # a run folder
    adapter = replace(recipe.adapter, keep=find("adapter", "keep", recipe.adapter.keep))
    model = replace(recipe.model, start_from=start)
    return replace(recipe, data=data, model=model, adapter=adapter)


def candidates(value: str, file: Path | None, recorded: str | None) -> Iterator[Path]:
    path = expand_user(value)
    yield path
    if path.is_absolute():
        return
    if file is not None:
        home = file.resolve().parent
        yield home / path
        for folder in (home, *home.parents):
            if folder.name == RECIPES and folder.parent != PACKAGE:  # a clone, not a wheel
                yield folder.parent / path
    if recorded is not None and Path(recorded).parts[-len(path.parts) :] == path.parts:
        yield Path(recorded)


def check_inputs(recipe: Recipe, begun: bool, needs_data: bool = True) -> None:
    """Raise if data, initial model, preset, stages or loggers are missing or invalid. A run that
    has `begun` needs its initial model only if that is frozen; a dry run needs no data."""
    plan(recipe)
    check_reporters(recipe.run.log_to)
    check_adapter(recipe)
    model, data = recipe.model, recipe.data
    if model.preset is not None and not begun:
        sizes = PRESETS[model.family, data.images is None]
        if data.image_text is not None:
            sizes = presets.IMAGE_TEXT_PRESETS
        presets.preset(model.preset, sizes)
    if data.image_text is not None:
        check_image_text(recipe)
    elif recipe.optimizer.part_rates:
        raise ValueError(
            f"optimizer.part_rates={recipe.optimizer.part_rates} is for data.image_text; "
            "leave it out"
        )
    if not needs_data and absent_data(recipe) is not None:
        pass
    elif data.image_text is not None:
        if is_mistyped(data.image_text):
            raise DataError(f"data.image_text: {missing_message(data.image_text)}")
    elif data.images is None:
        text_splits(recipe)
    elif data.images != DIGITS and is_mistyped(data.images):
        raise DataError(f"data.images: {missing_message(data.images)}")
    if model.start_from is not None and (not begun or recipe.adapter.freezes_base):
        check_start(model.start_from)


def check_adapter(recipe: Recipe) -> None:
    """Raise for options that an adapter cannot be combined with."""
    options = recipe.adapter
    if options.method is None:
        if options.keep is not None:
            raise DataError(f"adapter.keep={options.keep} needs adapter.method")
        return
    if recipe.model.start_from is None:
        raise DataError(
            f"adapter.method={options.method} adapts a trained model; name it in model.start_from"
        )
    for name, value, plain in (
        ("stages", len(recipe.stages), 0),
        ("run.nested", recipe.run.nested, None),
        ("run.tensor_parallel", recipe.run.tensor_parallel, 1),
    ):
        if value != plain:
            raise DataError(f"{name} cannot be combined with adapter.method={options.method}")
    if options.keep is not None and recipe.data.images is None:
        text_splits(replace(recipe, data=replace(recipe.data, corpus=options.keep)), "adapter.keep")


def absent_data(recipe: Recipe) -> str | None:
    """Return the name of the recipe's data if it is not a folder here. Images may be on the hub."""
    data = recipe.data
    name = data.image_text or data.images or data.corpus
    present = name is None or name == DIGITS or exists(expand_user(name))
    return None if present else name


def check_image_text(recipe: Recipe) -> None:
    """Raise for options that a recipe for images with text cannot have."""
    data = recipe.data
    for name in ("corpus", "images"):
        if getattr(data, name) is not None:
            raise ValueError(
                f"data.image_text={data.image_text} and data.{name}={getattr(data, name)} cannot "
                "both be trained on"
            )
    if recipe.model.family != "tokenformer":
        raise ValueError(
            f"model.family={recipe.model.family} has no vision-language model; use tokenformer"
        )
    if recipe.adapter.method is not None:
        raise ValueError(
            f"adapter.method={recipe.adapter.method} is not for data.image_text; train the new "
            "tokens: optimizer.part_rates"
        )
    if recipe.stages or recipe.run.nested or recipe.run.tensor_parallel > 1:
        raise ValueError(
            "a vision-language model is trained without stages, run.nested and "
            "run.tensor_parallel; leave them out"
        )


def check_start(name: str) -> None:
    folder = expand_user(name)
    if exists(folder) and folder.is_dir() and not (folder / "config.json").exists():
        raise DataError(f"model.start_from: {name} has no config.json; name a model or run folder")
    if is_mistyped(name):
        raise DataError(f"model.start_from: {missing_message(name)}")


def is_mistyped(name: str) -> bool:
    """Whether a name is neither an existing path nor a hub name: it is written as a path, or a
    similar path exists."""
    path = expand_user(name)
    return not exists(path) and (is_local(name) or closest_path(path) is not None)


def uses_rate_for_new_model(recipe: Recipe, file: Path) -> bool:
    """Whether a trained model would be trained at the learning rate of a recipe for new models."""
    written = read_mapping(file)
    if (written.get("model") or {}).get("start_from") is not None:
        return False
    rate = (written.get("optimizer") or {}).get("learning_rate", OptimizerOptions.learning_rate)
    return float(rate) == recipe.optimizer.learning_rate


def new_config(options: ModelOptions, config_class: type[Any], **from_data: Any) -> Any:
    """Return the configuration of a model to train from fresh weights: the options of the recipe,
    and what its data sets."""
    given = {**from_data, **options.options}
    config = (
        config_class.from_preset(options.preset, **given)
        if options.preset is not None
        else config_class(**given)
    )
    check_model_options(options.options, config_class)
    return config


def check_model_options(options: dict[str, Any], config_class: type[Any]) -> None:
    """Raise for an option that the configuration would store but no model would use."""
    known = {field.name for field in fields(config_class)} | {"num_labels", "num_classes"}
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean model.options.{near[0]}?" if near else ""
            raise DataError(
                f"model.options.{name} is not an option of {config_class.__name__}{hint}"
            )


def text_splits(
    recipe: Recipe, option: str = "data.corpus"
) -> tuple[Corpus, TextSplit, TextSplit | None]:
    """Return the corpus of a recipe, its training split and, if used, its validation split.
    Messages call the corpus `option`."""
    data = recipe.data
    if data.corpus is None:
        raise DataError(f"{option} is missing; name a folder made by `tokenformer prepare`")
    if not exists(expand_user(data.corpus)):
        hint = "" if closest_path(Path(data.corpus)) else "; make it with `tokenformer prepare`"
        raise DataError(f"{option}: {missing_message(data.corpus)}{hint}")
    corpus = Corpus(data.corpus)
    train = open_split(corpus, TRAIN)
    check_split(corpus, train, data.length, "")
    if recipe.run.validate_every == 0:
        return corpus, train, None
    remedy = ", or train without validation: --run.validate_every 0"
    if VALIDATION not in corpus.splits:
        raise DataError(
            f"{data.corpus} has no split {VALIDATION}; it has {', '.join(corpus.splits)}; prepare "
            f"the text with --validation 0.05{remedy}"
        )
    validation = open_split(corpus, VALIDATION)
    check_split(corpus, validation, data.length, remedy)
    return corpus, train, validation


def check_split(corpus: Corpus, split: TextSplit, length: int, remedy: str) -> None:
    if isinstance(split, Split) and len(split) <= length:
        raise DataError(
            f"split {split.name} of {corpus.folder} has {len(split):,} tokens, one sequence needs "
            f"{length + 1:,}; lower data.length{remedy}"
        )
