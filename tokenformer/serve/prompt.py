"""Prompts as token ids: the start token and the model's context length."""

from typing import Any

from torch import Tensor

from tokenformer.errors import TokenformerError

LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Names of the context length in the configurations of transformers."""


class PromptError(TokenformerError, ValueError):
    """A prompt that the model cannot continue."""


def context_length(config: Any) -> int | None:
    """Return the model's context length in tokens; None if the architecture has no limit."""
    text = config.get_text_config()  # the language model of a multimodal one
    lengths = (getattr(text, name, None) for name in LENGTHS)
    return next((length for length in lengths if isinstance(length, int) and length > 0), None)


def start_token(tokenizer: Any) -> int:
    """Return the token that starts a text: the BOS token, or else the EOS token."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise PromptError("the model's tokenizer has neither a BOS nor an EOS token")


def add_start_token(ids: Tensor, tokenizer: Any) -> Tensor:
    """Return `ids` [1, T], or the start token [1, 1] if the prompt is empty."""
    if ids.shape[1]:
        return ids
    return ids.new_full((1, 1), start_token(tokenizer)).long()  # an empty tensor is of floats


def remaining_context(ids: Tensor, context: int | None) -> int | None:
    """Return how many tokens of the context are left for the response; None for no limit."""
    if context is None:
        return None
    length = ids.shape[1]
    if length >= context:
        raise PromptError(
            f"the prompt has {length} tokens, the model's context {context}, response included"
        )
    return context - length
