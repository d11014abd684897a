"""What `save_pretrained` writes beside the weights: a loader stub, checksums and a model card.

Transformers does not know our model types. With `import tokenformer` it does; without it,
`from_pretrained(folder, trust_remote_code=True)` follows the `auto_map` of config.json to a stub in
the folder, which imports the package. Classes that are registered take precedence over `auto_map`,
so the stub does not run where tokenformer is imported, nor in any command of ours.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenformer.models.block_configuration import StubMap
from tokenformer.models.checksums import write_checksums
from tokenformer.models.configuration import VisionConfig
from tokenformer.models.model_card import STUB, read_history, write_card
from tokenformer.models.weight_files import remove_stale_weights

CLASSES = {
    "TokenformerConfig": {
        "AutoModel": "TokenformerModel",
        "AutoModelForCausalLM": "TokenformerForCausalLM",
    },
    "TransformerConfig": {
        "AutoModel": "TransformerModel",
        "AutoModelForCausalLM": "TransformerForCausalLM",
    },
    "TokenformerVisionConfig": {
        "AutoModelForImageClassification": "TokenformerForImageClassification",
    },
    "TransformerVisionConfig": {
        "AutoModelForImageClassification": "TransformerForImageClassification",
    },
}
"""The classes of each configuration that the Auto classes load, by their public names."""
PROCESSOR = "TokenformerImageProcessor"
SOURCE = '''\
"""Loads this model with the tokenformer package: there is no model code in this file."""

try:
    from tokenformer import {names}
except ImportError as error:
    raise ImportError(
        "this model needs the tokenformer package: pip install tokenformer"
    ) from error

__all__ = {quoted}
'''
RESAVED = "Saved again from Python; what was done to the weights in between is not recorded here."


@contextmanager
def auto_mapped(config: Any) -> Iterator[None]:
    """The configuration with the `auto_map` of our stub, while it is saved."""
    classes = CLASSES.get(type(config).__name__)
    if classes is None:  # of a class that a user derived from ours
        yield
        return
    before = getattr(config, "auto_map", None)
    names = {"AutoConfig": type(config).__name__, **classes}
    module = STUB.removesuffix(".py")
    config.auto_map = StubMap({auto: f"{module}.{name}" for auto, name in names.items()})
    try:
        yield
    finally:
        if before is None:
            del config.auto_map
        else:
            config.auto_map = before


def write_stub(folder: Path, names: list[str]) -> None:
    """Write the module that imports public names of the package for `auto_map`."""
    source = SOURCE.format(names=", ".join(names), quoted=names)
    (folder / STUB).write_text(source, encoding="utf-8")


def complete(model: Any, folder: Path) -> None:
    """Add the stub, the checksums and the card to a folder that `model` was just saved to, and
    remove the weights of an earlier save."""
    name = type(model.config).__name__
    if name in CLASSES:
        processor = [PROCESSOR] if isinstance(model.config, VisionConfig) else []
        write_stub(folder, [name, *CLASSES[name].values(), *processor])
    remove_stale_weights(folder)
    write_checksums(folder)
    loaded_from = Path(model.name_or_path)
    history = read_history(loaded_from) if model.name_or_path and loaded_from.is_dir() else []
    if history and history[-1] != RESAVED:
        history.append(RESAVED)
    write_card(folder, model.config, history)
