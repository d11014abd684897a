"""state.json: everything in a checkpoint that is not a tensor."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard, cast

from tokenformer.errors import CheckpointError
from tokenformer.train.parallel.ranks import Ranks

STATE = "state.json"


def read_state(path: Path, needs: Mapping[str, type] | None = None) -> dict[str, Any]:
    """Return the caller's state in a checkpoint that `latest` has verified. `needs`: required keys
    and their types."""
    with Ranks().together(f"checkpoint {path} cannot be read"):
        state: dict[str, Any] = parse_document(path)["state"]
        for name, kind in (needs or {}).items():
            if name not in state:
                raise CheckpointError(f"the state in {STATE} has no {name!r}")
            if not isinstance(state[name], kind):
                raise CheckpointError(
                    f"{name!r} in {STATE} is {state[name]!r:.40}, not of type {kind.__name__}"
                )
    return state


def read_document(path: Path) -> dict[str, Any]:
    """Return the contents of state.json. Collective."""
    with Ranks().together(f"checkpoint {path} cannot be read"):
        return parse_document(path)


def parse_document(path: Path) -> dict[str, Any]:
    """Return the contents of state.json; raise if they are not as `collect` writes them."""
    try:
        document = json.loads((path / STATE).read_bytes())
        step, groups = document["state"]["step"], document["optimizer"]
        fits = is_step(step) and (groups is None or all(map(is_group, groups)))
    except FileNotFoundError:
        raise CheckpointError(f"{STATE} is missing") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        fits = False
    if not fits:
        raise CheckpointError(f"{STATE} is not the state of a checkpoint")
    return cast(dict[str, Any], document)


def is_step(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_group(group: Any) -> bool:
    """Whether this is a parameter group as `read_groups` writes it."""
    kinds = {"parameters": list, "options": dict, "state": dict}
    return all(isinstance(group[name], kind) for name, kind in kinds.items())
