"""Text for a terminal: control characters and encodings."""

from json import dumps
from typing import Any


def printable(text: str, encoding: str) -> str:
    """Return generated text without control characters, which could control the terminal, and
    without characters that its encoding lacks."""
    shown = "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
    return shown.encode(encoding, errors="replace").decode(encoding)


def json_text(value: Any, encoding: str) -> str:
    """Return a JSON document; non-ASCII characters are escaped only if the encoding lacks them."""
    text = dumps(value, indent=2, ensure_ascii=False)
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return dumps(value, indent=2)
    return text
