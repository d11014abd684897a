"""What this room refuses, in words for the user."""

from tokenformer.errors import TokenformerError


class ConversionError(TokenformerError):
    """A model that cannot be converted, and why, on one line."""
