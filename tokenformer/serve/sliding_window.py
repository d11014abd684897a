"""Generation beyond a model's context, by a window that slides over the text.

A window fills up with the KV cache in use. When it is full, its last part is encoded anew as the
beginning of the next one, at positions from 0, so that the model never sees a position that it was
not trained on. This works with any causal language model of transformers, whatever its positions,
and keeps the native decoder in use inside of a window.

docs/results/generation.md has the figures behind `KEPT`.
"""

from typing import Any

import torch
from torch import Tensor

KEPT = 0.5
"""The least share of a full window that the next one begins with."""


def generate_sliding(
    model: Any,
    ids: Tensor,
    *,
    max_new_tokens: int,
    context: int | None,
    prefix: Tensor,
    tokenizer: Any,
    **options: Any,
) -> None:
    """Add `max_new_tokens` to `ids` [1, T], or fewer where the model ends the text; `options`, with
    the streamer that takes the new tokens, are those of `model.generate`. Every window begins with
    `prefix` [1, P], as `ids` does: the special tokens that the tokenizer puts before a text.

    Of the model's generation_config.json, the least lengths hold for the whole text, not for every
    window, and what does not fit a stream is overridden."""
    least = least_new_tokens(model, ids.shape[1])
    while max_new_tokens:
        window = last_part(ids, max_new_tokens, context, prefix)
        room = max_new_tokens if context is None else max(1, context - window.shape[1])
        asked = min(max_new_tokens, room)
        whole = model.generate(
            window,
            attention_mask=torch.ones_like(window),
            max_new_tokens=asked,
            max_length=None,
            min_new_tokens=None,
            min_length=window.shape[1] + min(least, asked) if least else 0,
            num_return_sequences=1,
            return_dict_in_generate=False,
            tokenizer=tokenizer,  # of stop_strings
            **options,
        )
        new = whole[:, window.shape[1] :]
        if new.shape[1] < asked or is_ended(model, whole, tokenizer):
            return
        ids = torch.cat([ids, new], dim=1)
        max_new_tokens -= asked
        least = max(0, least - asked)


def least_new_tokens(model: Any, length: int) -> int:
    """How many tokens must follow a prompt of `length` before the model may end the text."""
    settings = model.generation_config
    if settings.min_new_tokens is not None:
        return int(settings.min_new_tokens)
    return max(0, (settings.min_length or 0) - length)


def last_part(ids: Tensor, new: int, context: int | None, prefix: Tensor) -> Tensor:
    """The beginning of the next window: all ids while they leave room for one more, else the prefix
    and the last ones, `KEPT` of the context or as many as leave room for the `new` ones."""
    if context is None or ids.shape[1] < context:
        return ids
    kept = max(int(context * KEPT), context - new, 1)
    return torch.cat([prefix, ids[:, -max(kept - prefix.shape[1], 1) :]], dim=1)


def prefix_of(tokenizer: Any) -> Tensor:
    """The beginning-of-text token [1, 1] where the tokenizer puts one before every text, or [1, 0].
    Models that are trained with it attend to it much, so a window does without it only if a text
    does."""
    first = tokenizer("")["input_ids"][:1]
    return torch.tensor([first if first == [tokenizer.bos_token_id] else []], dtype=torch.long)


def is_ended(model: Any, ids: Tensor, tokenizer: Any) -> bool:
    """Whether a text [1, T] ends with one of the model's end tokens or stop strings."""
    from transformers import StopStringCriteria

    settings = model.generation_config
    ends = settings.eos_token_id
    if ends is not None and int(ids[0, -1]) in ({ends} if isinstance(ends, int) else set(ends)):
        return True
    stops = settings.stop_strings
    if not stops:
        return False
    return bool(StopStringCriteria(tokenizer, stops)(ids, None).any())
