"""What this room refuses, in words for the user."""

from collections.abc import Iterable

MOST_NAMES = 12


class ConversionError(Exception):
    """A model that cannot be converted, and why, on one line."""


def shown(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
