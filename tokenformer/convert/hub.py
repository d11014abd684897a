"""Files of the Hugging Face hub, by way of its local cache, which also serves without a network."""

from collections.abc import Sequence
from pathlib import Path

from tokenformer.errors import ConversionError

SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
SECONDS = 10.0


def fetch_model(name: str) -> Path:
    """The folder of a model: safetensors where there are any, else pickles."""
    here = not answers(name)
    folder = fetch(name, (*SMALL_FILES, "*.safetensors"), here)
    if any(folder.glob("*.safetensors")):
        return folder
    return fetch(name, (*SMALL_FILES, "*.bin"), here)


def fetch_tokenizer(name: str) -> Path:
    return fetch(name, ("tokenizer*", "special_tokens_map.json"), not answers(name))


def fetch(name: str, patterns: Sequence[str], here: bool) -> Path:
    """With `here` from the cache alone."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns), local_files_only=here))
    except (OSError, ValueError) as error:
        told = "the hub does not answer, and the cache has no copy" if here else str(error)
        raise ConversionError(
            f"{name} is neither a file or folder here nor to be had from the hub: {told}"
        ) from None


def answers(name: str) -> bool:
    """Whether the hub can be reached; left to itself, a download tries for half a minute."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=SECONDS)
    except HfHubHTTPError:
        return True  # if only to say no
    except Exception:  # which ones depends on the HTTP library that the hub's client uses
        return False
    return True
