"""A model for a verb that uses one: a folder or a hub name, with what reads for it."""

import importlib.util
from pathlib import Path
from typing import Any

from tokenformer.cli.errors import InputError


def load_model(name: str) -> tuple[Any, Any]:
    """Any Hugging Face causal language model, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return load_pair(name, AutoModelForCausalLM, AutoTokenizer)


def load_classifier(name: str) -> tuple[Any, Any]:
    """Any Hugging Face image classifier, and its image processor."""
    if importlib.util.find_spec("PIL") is None:
        raise InputError('images need Pillow: pip install "tokenformer[vision]"')

    from transformers import AutoImageProcessor, AutoModelForImageClassification

    return load_pair(name, AutoModelForImageClassification, AutoImageProcessor)


def load_pair(name: str, model_class: Any, preprocessor_class: Any) -> tuple[Any, Any]:
    """A model in eval mode on the best device, and its tokenizer or image processor.

    No code that a folder may bring is run; left out, `trust_remote_code` asks on the terminal.
    """
    from transformers.utils import logging

    import tokenformer  # noqa: F401  # so that the Auto classes know ours
    from tokenformer.train.distribution import device

    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").exists():
        inside = next((p for p in (folder / "model", folder) if (p / "config.json").exists()), None)
        if inside is None:
            raise InputError(f"{name} has no config.json; give a model folder or a hub name")
        name = str(inside)
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = model_class.from_pretrained(name, trust_remote_code=False)
        model = model.to(device()).eval()
        preprocessor = preprocessor_class.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"{name} cannot be loaded: {lines[0]}") from None
    finally:
        if shown:
            logging.enable_progress_bar()
    return model, preprocessor


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
