"""What this room refuses, in words for the user."""


class ConversionError(Exception):
    """A model that cannot be converted, and why, on one line."""
