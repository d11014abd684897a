"""What a verb raises when the user's input is at fault."""


class InputError(Exception):
    """Bad input, said in one line that names it and what would be accepted."""
