"""Files that `save_pretrained` adds to the weights: a loader stub, checksums and a model card.

Transformers knows our model types after `import tokenformer`. Without it,
`from_pretrained(folder, trust_remote_code=True)` follows the `auto_map` of config.json to a stub in
the folder, which imports the package. Registered classes take precedence over `auto_map`, so the
stub does not run where tokenformer is imported, nor in any of our commands.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tokenformer.models.backbone import BlockPreTrainedModel
from tokenformer.models.block_configuration import BlockConfig, StubMap
from tokenformer.models.checksums import write_checksums
from tokenformer.models.configuration import (
    TokenformerVisionConfig,
    TransformerVisionConfig,
    VisionConfig,
)
from tokenformer.models.image_text_configuration import TokenformerImageTextConfig
from tokenformer.models.model_card import STUB, read_history, write_card
from tokenformer.models.model_classes import MODEL_CLASSES
from tokenformer.models.weight_files import remove_stale_weights

PROCESSOR = "TokenformerImageProcessor"
IMAGE_TEXT_PROCESSOR = "TokenformerProcessor"
SOURCE = '''\
"""Loads this model with the tokenformer package: there is no model code in this file."""

try:
    from tokenformer import {names}
except ImportError as error:
    raise ImportError(
        "this model needs the tokenformer package: install it from its repository or a wheel"
    ) from error

__all__ = {quoted}
'''
PROCESSORS: dict[type[BlockConfig], list[str]] = {
    TokenformerVisionConfig: [PROCESSOR],
    TransformerVisionConfig: [PROCESSOR],
    TokenformerImageTextConfig: [PROCESSOR, IMAGE_TEXT_PROCESSOR],
}
"""The processors of a model that are imported by its stub."""
RESAVED = "Saved again from Python; changes to the weights in between are not recorded here."


def auto_classes(config: BlockConfig) -> dict[str, str]:
    """Return the public names that each Auto class loads for a configuration; none for a class
    that a user derived from ours."""
    model_class = MODEL_CLASSES.get(type(config))
    if model_class is None:
        return {}
    name = model_class.__name__
    if isinstance(config, VisionConfig):
        return {"AutoModelForImageClassification": name}
    if isinstance(config, TokenformerImageTextConfig):
        return {"AutoModelForImageTextToText": name}
    return {"AutoModel": model_class.backbone.__name__, "AutoModelForCausalLM": name}


@contextmanager
def auto_mapped(config: BlockConfig) -> Iterator[None]:
    """Point the `auto_map` of a configuration to our stub while it is saved."""
    classes = auto_classes(config)
    if not classes:
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


def save_except_weights(
    model: BlockPreTrainedModel, folder: Path, hashes: Mapping[str, str]
) -> None:
    """Save what `save_pretrained` saves next to the weights, which a `WeightWriter` has written.
    `hashes` is what it returned."""
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    with auto_mapped(model.config):
        model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    complete(model, folder, hashes)


def complete(
    model: BlockPreTrainedModel, folder: Path, hashes: Mapping[str, str] | None = None
) -> None:
    """Add the stub, the checksums and the card to a folder that `model` was just saved to, and
    remove the weights of an earlier save."""
    if classes := auto_classes(model.config):
        processor = PROCESSORS.get(type(model.config), [])
        write_stub(folder, [type(model.config).__name__, *classes.values(), *processor])
    remove_stale_weights(folder)
    write_checksums(folder, hashes)
    loaded_from = Path(model.name_or_path)
    history = read_history(loaded_from) if model.name_or_path and loaded_from.is_dir() else []
    if history and history[-1] != RESAVED:
        history.append(RESAVED)
    write_card(folder, model.config, history)
