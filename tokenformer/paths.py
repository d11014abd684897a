"""Local paths and hub names that users give: tell them apart, check them, suggest corrections."""

import difflib
import re
from functools import cache
from pathlib import Path

from tokenformer.errors import AdapterError, TokenformerError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,99}")
HUB_SECONDS = 10.0
"""Timeout of the request that checks a name on the hub."""


class NameNotFoundError(TokenformerError, ValueError):
    """A name that is neither a local path nor on the hub."""


def is_local(name: str) -> bool:
    """Whether a name can only be a local path: it exists, looks like a path, or its parent folder
    exists. `owner/name` is a hub name unless there is a local folder `owner`."""
    path = expand_user(name)
    written_as_path = path.is_absolute() or name.startswith((".", "~")) or name.endswith("/")
    in_folder = len(path.parts) == 2 and exists(path.parent) and path.parent.is_dir()
    return exists(path) or written_as_path or in_folder or len(path.parts) not in (1, 2)


def expand_user(name: str | Path) -> Path:
    """Return the path with `~` replaced by the home folder."""
    try:
        return Path(name).expanduser()
    except RuntimeError:  # `~nobody`
        return Path(name)


def exists(path: Path) -> bool:
    """`Path.exists`, but False for invalid names: too long, or with a NUL."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def find_adapter(name: str | Path) -> Path:
    """Return the folder of an adapter, for it or for a run folder with `adapter` inside. Adapters
    are local: a name is never looked up on the hub."""
    path = expand_user(name)
    if not exists(path):
        raise AdapterError(f"the adapter {name} does not exist: {missing_message(name)}")
    if not path.is_dir():
        raise AdapterError(f"the adapter {name} is a file; give the folder that it is in")
    for folder in (path, path / "adapter"):
        if (folder / ADAPTER_CONFIG).is_file():
            return folder
    kind = "a model, not an adapter" if (path / "config.json").is_file() else "not an adapter"
    raise AdapterError(f"{name} is {kind}: it has no {ADAPTER_CONFIG}")


def check_adapter_name(name: str, source: str) -> None:
    """Raise an error unless clients of a server can use the name of an adapter."""
    if not ADAPTER_NAME.fullmatch(name):
        raise AdapterError(
            f"{source}: the name {name!r} must be 1 to 100 letters, digits or . _ : / -, and begin "
            "with a letter or digit; give another as NAME=DIR"
        )


def missing_message(name: str | Path) -> str:
    """Return the message for a missing path: `no runs/txt; did you mean runs/text?`"""
    near = closest_path(expand_user(name))
    return f"no {name}" + (f"; did you mean {near}?" if near else "")


def closest_path(path: Path) -> Path | None:
    """Return the existing path closest to a missing one, or None. One part of it may differ."""
    parent = next((p for p in path.parents if exists(p)), None)
    if parent is None:
        return None
    typed = path.relative_to(parent).parts
    try:
        names = [entry.name for entry in parent.iterdir() if not entry.name.startswith(".")]
    except OSError:  # the parent is a file, or not readable
        return None
    for name in difflib.get_close_matches(typed[0], names, n=3, cutoff=0.6):
        candidate = parent.joinpath(name, *typed[1:])
        # Names that share little but their suffix are not similar.
        similarity = difflib.SequenceMatcher(None, Path(typed[0]).stem, Path(name).stem).ratio()
        if similarity >= 0.6 and exists(candidate):
            return candidate
    return None


@cache
def check_hub(name: str, kind: str = "model") -> None:
    """Raise `NameNotFoundError` unless the hub or its local cache has `name`.

    `kind` is model or dataset.
    """
    from huggingface_hub import constants

    cached = f"{kind}s--{name.replace('/', '--')}"
    if (Path(constants.HF_HUB_CACHE) / cached / "snapshots").is_dir():
        return
    reason = ask_hub(name, kind)
    if reason is None:
        return
    near = closest_path(expand_user(name))
    hint = f"; did you mean {near}?" if near else ""
    raise NameNotFoundError(
        f"{name} is neither a folder here nor a {kind} on the hub ({reason}){hint}"
    )


def ask_hub(name: str, kind: str = "model") -> str | None:
    """Return None if the hub has `name`, else the reason. Sends one request; transformers and
    datasets would retry for a minute."""
    from huggingface_hub import HfApi
    from huggingface_hub import errors as hub

    try:
        HfApi().repo_info(name, repo_type=kind, timeout=HUB_SECONDS)
    except hub.HFValidationError:
        return "not a valid hub name"
    except hub.RepositoryNotFoundError:
        return "not found; a private one needs HF_TOKEN"
    except hub.OfflineModeIsEnabled:
        return "offline mode is on"
    except hub.HfHubHTTPError as error:
        return f"the hub answered with status {error.response.status_code}"
    except Exception:  # whatever its HTTP library raises
        return "could not connect"
    return None
