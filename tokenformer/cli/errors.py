"""What a command raises when the user's input is at fault."""

from tokenformer.errors import TokenformerError


class InputError(TokenformerError):
    """Bad input: the message names it and what would be accepted."""
