"""What is written to a terminal."""

from json import dumps
from typing import Any


def printable(text: str, encoding: str) -> str:
    """What a model writes may hold anything: control characters, which steer a terminal, and
    characters that its encoding does not have."""
    shown = "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
    return shown.encode(encoding, errors="replace").decode(encoding)


def json_text(value: Any, encoding: str) -> str:
    """A JSON document with its characters as they are, or escaped where the encoding lacks some."""
    text = dumps(value, indent=2, ensure_ascii=False)
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return dumps(value, indent=2)
    return text
