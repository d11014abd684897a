"""A prompt as a model takes it: token ids that leave room for an answer."""

from typing import Any

from torch import Tensor

from tokenformer.errors import TokenformerError

LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""What configurations of transformers call the context length."""


class PromptError(TokenformerError, ValueError):
    """A prompt that the model cannot go on with, said in one line."""


def context_length(config: Any) -> int | None:
    """How many tokens the model was made for; None where its kind has no such limit."""
    text = config.get_text_config()  # of a model of several modalities, else itself
    lengths = (getattr(text, name, None) for name in LENGTHS)
    return next((length for length in lengths if isinstance(length, int) and length > 0), None)


def start_token(tokenizer: Any) -> int:
    """What a text begins after."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise PromptError("the model's tokenizer has neither a beginning nor an end of text")


def begin(ids: Tensor, tokenizer: Any) -> Tensor:
    """The ids [1, T] themselves; of an empty prompt, the beginning of a text."""
    if ids.shape[1]:
        return ids
    return ids.new_full((1, 1), start_token(tokenizer)).long()  # no ids make a tensor of floats


def room(ids: Tensor, context: int | None) -> int | None:
    """How many tokens the context leaves for the answer, at least one; None for no limit."""
    if context is None:
        return None
    length = ids.shape[1]
    if length >= context:
        raise PromptError(
            f"the prompt has {length} tokens, the model's context {context}, answer included"
        )
    return context - length
