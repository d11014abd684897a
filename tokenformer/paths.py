"""Paths and hub names that users give: telling one from the other, and asking the hub once."""

import difflib
from functools import cache
from pathlib import Path

from tokenformer.errors import TokenformerError

HUB_SECONDS = 10.0
"""How long the hub has to answer whether it knows a name."""


class NameNotFoundError(TokenformerError, ValueError):
    """A name that is neither a path here nor on the hub."""


def is_local(name: str) -> bool:
    """Whether a name can only mean a local path: it exists, is written like a path, or the folder
    it would be in exists. `owner/name` is a hub name unless there is a folder `owner` here."""
    path = expanded(name)
    written_as_path = path.is_absolute() or name.startswith((".", "~")) or name.endswith("/")
    in_folder = len(path.parts) == 2 and exists(path.parent) and path.parent.is_dir()
    return exists(path) or written_as_path or in_folder or len(path.parts) not in (1, 2)


def expanded(name: str | Path) -> Path:
    """The path with `~` replaced by the home folder."""
    try:
        return Path(name).expanduser()
    except RuntimeError:  # `~nobody`
        return Path(name)


def exists(path: Path) -> bool:
    """Also of what no file can be called: too long a name, or one with a NUL in it."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def missing(name: str | Path) -> str:
    """The message for a path that does not exist: `no runs/txt; did you mean runs/text?`"""
    near = nearest(expanded(name))
    return f"no {name}" + (f"; did you mean {near}?" if near else "")


def nearest(path: Path) -> Path | None:
    """The existing path most like a missing one, which differs in one part of it."""
    parent = next((p for p in path.parents if exists(p)), None)
    if parent is None:
        return None
    typed = path.relative_to(parent).parts
    try:
        names = [entry.name for entry in parent.iterdir() if not entry.name.startswith(".")]
    except OSError:  # the parent is a file, or closed to us
        return None
    for name in difflib.get_close_matches(typed[0], names, n=3, cutoff=0.6):
        candidate = parent.joinpath(name, *typed[1:])
        # Names that have little in common but their suffix are not alike.
        likeness = difflib.SequenceMatcher(None, Path(typed[0]).stem, Path(name).stem).ratio()
        if likeness >= 0.6 and exists(candidate):
            return candidate
    return None


@cache
def check_hub(name: str, kind: str = "model") -> None:
    """Raise `NameNotFoundError` unless the hub, or its cache on this machine, has `name`; `kind`
    is model or dataset. The hub is asked once: transformers and datasets would retry for a minute.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub import errors as hub

    cached = f"{kind}s--{name.replace('/', '--')}"
    if (Path(constants.HF_HUB_CACHE) / cached / "snapshots").is_dir():
        return
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=HUB_SECONDS)
        return
    except hub.HFValidationError:
        reason = "not a valid name there"
    except hub.RepositoryNotFoundError:
        reason = "not found; a private one needs HF_TOKEN"
    except hub.OfflineModeIsEnabled:
        reason = "not asked: offline mode is on"
    except hub.HfHubHTTPError as error:
        reason = f"it answered with status {error.response.status_code}"
    except Exception:  # whichever its HTTP library raises
        reason = "could not connect"
    near = nearest(expanded(name))
    hint = f"; did you mean {near}?" if near else ""
    raise NameNotFoundError(
        f"{name} is neither a folder here nor a {kind} on the hub ({reason}){hint}"
    )
