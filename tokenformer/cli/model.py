"""A model for a verb that uses one: a folder or a hub name, with what reads for it."""

import importlib.util
from pathlib import Path
from typing import Any

from tokenformer.cli.errors import InputError


def load_model(name: str, bits: int | None = None) -> tuple[Any, Any]:
    """Any Hugging Face causal language model, and its tokenizer; of 8 bits a TokenFormer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tokenformer import TokenQuantization

    options = {} if bits is None else {"quantization_config": TokenQuantization(bits)}
    return load_pair(name, AutoModelForCausalLM, AutoTokenizer, "tokenizer", **options)


def check_bits(bits: int | None) -> None:
    if bits not in (None, 8):
        raise InputError(f"--bits {bits}: tokens are rounded to 8 bits or not at all")


def load_classifier(name: str) -> tuple[Any, Any]:
    """Any Hugging Face image classifier, and its image processor."""
    if importlib.util.find_spec("PIL") is None:
        raise InputError('images need Pillow: pip install "tokenformer[vision]"')

    from transformers import AutoImageProcessor, AutoModelForImageClassification

    return load_pair(name, AutoModelForImageClassification, AutoImageProcessor, "image processor")


def load_pair(
    name: str, model_class: Any, reader_class: Any, reader_name: str, **options: Any
) -> tuple[Any, Any]:
    """A model in eval mode on the best device, and what reads for it."""
    from safetensors import SafetensorError
    from transformers.utils import logging

    import tokenformer  # noqa: F401  # so that the Auto classes know ours
    from tokenformer.models.loading import load_whole
    from tokenformer.train.distribution import device

    name = model_name(name)
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    what = name
    try:
        model = load_whole(model_class, name, **options).to(device()).eval()
        what = f"the {reader_name} of {name}"
        reader = reader_class.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"{what} cannot be loaded: {lines[0]}") from None
    finally:
        if shown:
            logging.enable_progress_bar()
    # Where a folder has no tokenizer, transformers makes one up that knows no text.
    if reader_name == "tokenizer" and not set(reader.get_vocab()) - set(reader.all_special_tokens):
        raise InputError(f"{name} has no tokenizer; put one into the folder")
    return model, reader


def model_name(name: str) -> str:
    """The model folder that a path means, which of a run is the one inside; else a hub name."""
    folder = Path(name)
    if folder.is_file():
        raise InputError(f"{name} is a file; give the model folder that it is in, or a hub name")
    if folder.is_dir():
        for inside in (folder, folder / "model"):
            if (inside / "config.json").exists():
                return str(inside)
        raise InputError(f"{name} has no config.json; give a model folder or a hub name")
    if folder.is_absolute() or name.startswith((".", "~")) or len(folder.parts) > 2:
        raise InputError(f"{name} cannot be loaded: there is no such folder")
    return name


def load_tokenformer(folder: Path) -> Any:
    """A TokenFormer from its folder, in eval mode, for what is done to tokens alone."""
    from transformers import AutoConfig

    # Imported before AutoConfig is asked, so that the Auto classes know ours.
    from tokenformer.models.catalogue import MODELS
    from tokenformer.models.projection_configuration import TokenConfig

    if not (folder / "config.json").exists():
        raise InputError(f"{folder} is not a model folder: it has no config.json")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if not isinstance(config, TokenConfig):
        raise InputError(f"{folder} is a {config.model_type} model, not a TokenFormer")
    return MODELS[type(config)].from_pretrained(folder).eval()
