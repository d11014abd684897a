"""MODEL on the command line: a model folder, a run folder or a hub name."""

import importlib.util
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from json import loads
from pathlib import Path
from typing import Any

from tokenformer.errors import (
    CheckpointError,
    ConversionError,
    InputError,
    TokenformerError,
    first_line,
    one_line,
)
from tokenformer.installation import install_hint
from tokenformer.paths import (
    check_adapter_name,
    check_hub,
    exists,
    expand_user,
    find_adapter,
    is_local,
    missing_message,
)

CONFIG = "config.json"
IMAGE_TEXT = "a vision-language model"
KINDS = {
    "a language model": ("ForCausalLM", "LMHeadModel"),
    "an image classifier": ("ForImageClassification",),
    IMAGE_TEXT: ("ForImageTextToText",),
}
"""Suffixes of the transformers classes of each kind."""
USES = {
    "a language model": "tokenformer generate, serve or evaluate --perplexity",
    "an image classifier": "tokenformer predict or evaluate --images",
    IMAGE_TEXT: "tokenformer generate, serve or evaluate --captions",
}
TOKENIZER_FILES = (
    "tokenizer*",
    "*vocab*",
    "merges.txt",
    "*.model",
    "*.spm",
    "*.tiktoken",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
"""File names of transformers' tokenizers; they must not match our modeling_tokenformer.py."""


def resolve_model(name: str | Path, kind: str | None = None) -> str:
    """Return the model folder for a model folder or run folder, or the hub name.

    Imports neither torch nor transformers, so a wrong name fails at once. Refuses a folder whose
    model is not of `kind`, one of `KINDS`.
    """
    name = str(name)
    if not is_local(name):
        check_hub(name)
        return name
    path = expand_user(name)
    if not exists(path):
        raise InputError(missing_message(name))
    if not path.is_dir():
        raise InputError(f"{name} is a file; give the model folder that it is in, or a hub name")
    for folder in (path, path / "model"):
        if (folder / CONFIG).is_file():
            check_kind(folder, kind)
            return str(folder)
    hint = "; the run has no model yet" if (path / "config.yaml").exists() else ""
    raise InputError(f"{name} has no {CONFIG}{hint}; give a model folder, a run or a hub name")


def takes_images_with_text(name: str) -> bool:
    """Whether a model is a vision-language model, by its config.json. False for a hub name that
    cannot be read: loading it says why."""
    found = resolve_model(name)
    if is_local(found):
        return kind_of(Path(found)) == IMAGE_TEXT

    from huggingface_hub import hf_hub_download

    try:
        return kind_of(Path(hf_hub_download(found, CONFIG)).parent) == IMAGE_TEXT
    except (OSError, ValueError):
        return False


def kind_of(folder: Path) -> str | None:
    """Return the kind of model that a folder holds, one of `KINDS`; None if it does not say."""
    names = read_config(folder).get("architectures") or []
    kinds = (
        kind
        for kind, endings in KINDS.items()
        if any(str(name).endswith(endings) for name in names)
    )
    return next(kinds, None)


def check_kind(folder: Path, kind: str | None) -> None:
    """Refuse a folder whose config.json is unreadable or belongs to another kind of model."""
    found = kind_of(folder)
    if found is not None and kind not in (None, found):
        raise InputError(f"{folder} is {found}, not {kind}; use {USES[found]}")
    if kind == "a language model" and not any(any(folder.glob(each)) for each in TOKENIZER_FILES):
        raise InputError(f"{folder} has no tokenizer; copy its tokenizer.json into the folder")


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json, unchecked."""
    file = folder / CONFIG
    try:
        config = loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not JSON: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict):
        raise InputError(f"{file} is not a model's configuration: it holds no JSON object")
    return config


def resolve_folder(name: str | Path) -> Path:
    """Return the local folder of a model, for commands that read its files; download a hub name."""
    found = resolve_model(name)
    if is_local(found):
        return Path(found)

    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.txt", "*.model"]
        return Path(snapshot_download(found, allow_patterns=patterns))
    except OSError as error:
        raise InputError(f"{found} cannot be downloaded: {first_line(error)}") from None


@contextmanager
def model_errors(out: Path, source: str = "") -> Iterator[None]:
    """Raise errors in models, checkpoints, data and options as one-line `InputError`s, which begin
    with `source` unless they name it; hide the progress bars of transformers."""
    from safetensors import SafetensorError
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    except (ValueError, SafetensorError, CheckpointError, ConversionError) as error:
        message = one_line(error)
        named = source in message  # an empty source is in every message
        raise InputError(message if named else f"{source}: {message}") from None
    except OSError as error:
        raise InputError(f"{error.filename or out}: {error.strerror or error}") from None
    finally:
        if shown:
            logging.enable_progress_bar()


def load_model(
    name: str,
    bits: int | None = None,
    *,
    verify: bool = True,
    adapters: Mapping[str, Path] | None = None,
) -> tuple[Any, Any]:
    """Return a causal language model and its tokenizer. `bits=8` or `bits=4` quantizes
    the weights of a TokenFormer; `verify=False` skips verifying the weights. `adapters` are active
    together."""
    name = resolve_model(name, "a language model")

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tokenformer import TokenQuantization

    options = {} if bits is None else {"quantization_config": TokenQuantization(bits)}
    model, tokenizer = load_pair(
        name, AutoModelForCausalLM, AutoTokenizer, "tokenizer", verify=verify, **options
    )
    return with_adapters(model, adapters), tokenizer


def check_bits(bits: int | None) -> None:
    if bits not in (None, 4, 8):
        raise InputError(f"--bits {bits} is not supported; use 4 or 8, or leave it out")


def load_classifier(
    name: str, *, verify: bool = True, adapters: Mapping[str, Path] | None = None
) -> tuple[Any, Any]:
    """Return an image classifier, with `adapters` active together, and its image processor."""
    check_pillow()
    name = resolve_model(name, "an image classifier")

    from transformers import AutoImageProcessor, AutoModelForImageClassification

    classes = AutoModelForImageClassification, AutoImageProcessor
    model, processor = load_pair(name, *classes, "image processor", verify=verify)
    return with_adapters(model, adapters), processor


def adapter_folders(given: Sequence[str], base: str | None = None) -> dict[str, Path]:
    """Return the folders of `--adapter DIR` or `--adapter NAME=DIR` by name; `base` is the name of
    the model, which no adapter may have. Imports nothing slow."""
    folders: dict[str, Path] = {}
    for text in given:
        name, equals, folder = text.partition("=")
        if not equals or exists(expand_user(text)):
            name, folder = "", text
        found = find_adapter(folder)
        name = name or default_name(folder)
        check_adapter_name(name, f"--adapter {text}")
        if name in folders:
            raise InputError(f"--adapter {text}: there are two named {name}; use NAME=DIR")
        if name == base:
            raise InputError(
                f"--adapter {text}: the model itself has the name {name}; use another NAME=DIR or "
                "--name"
            )
        folders[name] = found
    if folders:
        check_peft("--adapter")
    return folders


def check_peft(option: str) -> None:
    if importlib.util.find_spec("peft") is None:
        raise InputError(f"{option} needs peft: {install_hint('peft')}")


def default_name(folder: str) -> str:
    """Return the name of an adapter's folder, or of the run that it is in."""
    path = expand_user(folder).resolve()
    return path.parent.name if path.name == "adapter" else path.name


def with_adapters(model: Any, adapters: Mapping[str, Path] | None) -> Any:
    """Return a model with adapters that are active together."""
    if not adapters:
        return model

    from tokenformer.adapters.adapter_folder import AdapterFolder, attach_adapters

    with adapter_warnings():
        return attach_adapters(model, [AdapterFolder.read(path) for path in adapters.values()])


@contextmanager
def adapter_warnings() -> Iterator[None]:
    """Print the warnings of adapters, such as about a base that cannot be compared, in one line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    ours = (each.message for each in caught if each.category is UserWarning)
    for line in dict.fromkeys(" ".join(str(message).split()) for message in ours):
        sys.stderr.write(f"warning: {line}\n")


def load_image_text(name: str, *, verify: bool = True) -> tuple[Any, Any]:
    """Return a vision-language model and its processor."""
    check_pillow()
    name = resolve_model(name, IMAGE_TEXT)

    from transformers import AutoModelForImageTextToText, AutoProcessor

    from tokenformer import TokenformerForImageTextToText

    classes = AutoModelForImageTextToText, AutoProcessor
    model, processor = load_pair(name, *classes, "processor", verify=verify)
    if not isinstance(model, TokenformerForImageTextToText):
        raise InputError(f"{name} is a {type(model).__name__}, not a model of `tokenformer join`")
    return model, processor


def check_image_text_options(**options: Any) -> None:
    """Refuse options that a vision-language model does not take."""
    for option, value in options.items():
        if value:
            raise InputError(f"--{option} is for language models, not for {IMAGE_TEXT}")


def check_pillow() -> None:
    if importlib.util.find_spec("PIL") is None:
        raise InputError(f"images need Pillow: {install_hint('vision')}")


def load_pair(
    name: str, model_class: Any, reader_class: Any, reader_name: str, **options: Any
) -> tuple[Any, Any]:
    """Return a model, in eval mode on the best device, and its tokenizer or image processor."""
    from transformers.utils import logging

    import tokenformer  # noqa: F401  # registers our classes with the Auto classes
    from tokenformer.models.loading import device, load_pretrained

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = load_pretrained(model_class, name, **options).to(device()).eval()
        reader = reader_class.from_pretrained(name, trust_remote_code=False)
    except TokenformerError:
        raise
    except Exception as error:  # transformers can raise anything on a damaged folder
        problem = f"the {reader_name} of {name} cannot be loaded: {first_line(error)}"
        raise InputError(problem) from error
    finally:
        if shown:
            logging.enable_progress_bar()
    # Without tokenizer files, transformers returns a tokenizer with special tokens only.
    if reader_name == "tokenizer" and not set(reader.get_vocab()) - set(reader.all_special_tokens):
        raise InputError(f"{name} has no tokenizer; copy its tokenizer.json into the folder")
    return model, reader
