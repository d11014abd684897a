"""Downloading models and tokenizers from the Hugging Face hub, or from its cache when offline."""

from collections.abc import Sequence
from pathlib import Path

from tokenformer.errors import ConversionError, first_line
from tokenformer.paths import ask_hub

SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja")


def fetch_model(name: str) -> Path:
    """Return the local folder of a model: its safetensors, or else its pickles."""
    problem = ask_hub(name)
    folder = fetch(name, (*SMALL_FILES, "*.safetensors"), problem)
    if any(folder.glob("*.safetensors")):
        return folder
    return fetch(name, (*SMALL_FILES, "*.bin"), problem)


def fetch_tokenizer(name: str) -> Path:
    return fetch(name, ("tokenizer*", "special_tokens_map.json"), ask_hub(name))


def fetch(name: str, patterns: Sequence[str], problem: str | None) -> Path:
    """Return the folder of a snapshot; only the cache is used if the hub has a `problem`."""
    from huggingface_hub import snapshot_download

    cached_only = problem is not None
    try:
        return Path(
            snapshot_download(name, allow_patterns=list(patterns), local_files_only=cached_only)
        )
    except (OSError, ValueError) as error:
        reason = f"{problem}, and it is not in the cache" if problem else first_line(error)
        raise ConversionError(
            f"{name} is neither a file or folder here nor a model on the hub ({reason})"
        ) from None
