"""What the data room raises when a corpus, a tokenizer or a folder is at fault."""

from tokenformer.errors import TokenformerError


class DataError(TokenformerError, ValueError):
    """Said in one line that names what is wrong and what would be accepted."""
