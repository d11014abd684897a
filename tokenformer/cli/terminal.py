"""What is written to a terminal."""


def printable(text: str, encoding: str) -> str:
    """What a model writes may hold anything: control characters, which steer a terminal, and
    characters that its encoding does not have."""
    shown = "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
    return shown.encode(encoding, errors="replace").decode(encoding)
