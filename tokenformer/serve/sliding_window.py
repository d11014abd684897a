"""Generation beyond a model's context with a sliding window.

Generation fills the context with the KV cache in use. When it is full, its last part becomes the
start of the next window, encoded again at positions from 0, so the model never sees a position it
was not trained on. This works with any causal language model of transformers and any positional
encoding, and the native decoder stays in use within a window.

docs/results/generation.md has the measurements behind `KEPT`.
"""

from typing import Any

import torch
from torch import Tensor

KEPT = 0.5
"""The minimum share of a full window that the next one starts with."""


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
    """Generate `max_new_tokens` after `ids` [1, T], or fewer if the model ends the text.

    `options` go to `model.generate`; its `streamer` receives the new tokens. Every window starts
    with `prefix` [1, P], the special tokens that the tokenizer puts before a text, as `ids` does.

    The minimum lengths in the model's generation_config.json hold for the whole text, not for every
    window. Settings that do not fit a stream are overridden.
    """
    min_new = min_new_tokens(model, ids.shape[1])
    while max_new_tokens:
        window = next_window(ids, max_new_tokens, context, prefix)
        remaining = max_new_tokens if context is None else max(1, context - window.shape[1])
        requested = min(max_new_tokens, remaining)
        output = model.generate(
            window,
            attention_mask=torch.ones_like(window),
            max_new_tokens=requested,
            max_length=None,
            min_new_tokens=None,
            min_length=window.shape[1] + min(min_new, requested) if min_new else 0,
            num_return_sequences=1,
            return_dict_in_generate=False,
            tokenizer=tokenizer,  # for stop_strings
            **options,
        )
        new = output[:, window.shape[1] :]
        if new.shape[1] < requested or has_ended(model, output, tokenizer):
            return
        ids = torch.cat([ids, new], dim=1)
        max_new_tokens -= requested
        min_new = max(0, min_new - requested)


def min_new_tokens(model: Any, length: int) -> int:
    """Return how many tokens must follow a prompt of `length` before the model may end the text."""
    settings = model.generation_config
    if settings.min_new_tokens is not None:
        return int(settings.min_new_tokens)
    return max(0, (settings.min_length or 0) - length)


def next_window(ids: Tensor, new: int, context: int | None, prefix: Tensor) -> Tensor:
    """Return the start of the next window: all `ids` if the context has space for one more token;
    otherwise the prefix and the last ids, `KEPT` of the context or more if `new` tokens fit."""
    if context is None or ids.shape[1] < context:
        return ids
    kept = max(int(context * KEPT), context - new, 1)
    return torch.cat([prefix, ids[:, -max(kept - prefix.shape[1], 1) :]], dim=1)


def bos_prefix(tokenizer: Any) -> Tensor:
    """Return the BOS token [1, 1] if the tokenizer puts one before every text, otherwise [1, 0].
    Models trained with it attend to it strongly, so every window needs it."""
    first = tokenizer("")["input_ids"][:1]
    return torch.tensor([first if first == [tokenizer.bos_token_id] else []], dtype=torch.long)


def has_ended(model: Any, ids: Tensor, tokenizer: Any) -> bool:
    """Return whether a text [1, T] ends with one of the model's EOS tokens or stop strings."""
    from transformers import StopStringCriteria

    settings = model.generation_config
    eos = settings.eos_token_id
    if eos is not None and int(ids[0, -1]) in ({eos} if isinstance(eos, int) else set(eos)):
        return True
    stops = settings.stop_strings
    if not stops:
        return False
    return bool(StopStringCriteria(tokenizer, stops)(ids, None).any())
