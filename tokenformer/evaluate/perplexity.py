"""Perplexity of a causal language model over a text, by sliding windows.

A window is `length` tokens; each begins `stride` after the last and scores only the tokens that the
windows before it have not. Every token of the text is scored once, with at least `length - stride`
tokens of context wherever there are so many. The text follows an end-of-text token, so that its
first token is predicted as any document's is.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer.data.token_ids import TokenIds, TokenSequence
from tokenformer.errors import DataError
from tokenformer.evaluate.capacity import tokens_at_once
from tokenformer.evaluate.evaluation_text import Text


@dataclass(frozen=True)
class Perplexity:
    nats: float
    """The negative log-likelihood of the whole text."""
    tokens: int
    bytes: int
    words: int

    @property
    def token_perplexity(self) -> float:
        return perplexity_of(self.nats, self.tokens)

    @property
    def word_perplexity(self) -> float:
        return perplexity_of(self.nats, self.words)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes

    def asdict(self) -> dict[str, float | None]:
        """As JSON holds it, which has no infinity: None stands for that."""
        names = ("token_perplexity", "word_perplexity", "bits_per_byte")
        facts = asdict(self) | {name: getattr(self, name) for name in names}
        return {name: fact if math.isfinite(fact) else None for name, fact in facts.items()}


def perplexity_of(nats: float, parts: int) -> float:
    """exp(nats / parts), or infinity where a float cannot hold it (few words, a bad model)."""
    try:
        return math.exp(nats / parts) if parts else math.inf
    except OverflowError:
        return math.inf


@torch.no_grad()
def measure_perplexity(
    model: Any,
    text: Text,
    *,
    start: int,
    length: int,
    stride: int | None = None,
    batch_size: int | None = None,
    on_tokens: Callable[[int], None] = lambda tokens: None,
) -> Perplexity:
    """Perplexity of `text` after the token `start`; `on_tokens` hears how many are scored so far.

    `model` is any Hugging Face causal language model. The stride is half the length by default.
    """
    stride = stride or max(1, length // 2)
    if not 1 <= stride <= length:
        raise ValueError(f"stride={stride} must be from 1 to length={length}")
    if len(text.tokens) == 0:
        raise ValueError("the text is empty")
    if batch_size is None:
        batch_size = max(1, tokens_at_once(model) // length)
    device, was_training = model.device, model.training
    model.eval()
    nats, scored = 0.0, 0
    for ids, fresh in batches(text.tokens, start, length, stride, batch_size):
        try:
            logits = model(input_ids=ids[:, :-1].to(device), use_cache=False).logits[:, -fresh:]
        except (IndexError, ValueError):  # of a model that has learned its positions one by one
            most = getattr(model.config, "max_position_embeddings", length)
            if length <= most:
                raise
            raise DataError(
                f"the model has {most} positions, too few for windows of {length} tokens"
            ) from None
        targets = ids[:, -fresh:].to(device)
        losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        nats += losses.double().sum().item()
        scored += losses.numel()
        on_tokens(scored)
    model.train(was_training)
    assert scored == len(text.tokens)  # each once
    return Perplexity(nats, scored, text.bytes, text.words)


def batches(
    tokens: TokenSequence, start: int, length: int, stride: int, batch_size: int
) -> Iterator[tuple[Tensor, int]]:
    """Windows of equal shape together: ids [B, inputs + 1], and how many of the last are scored."""
    waiting: list[TokenIds] = []
    shape = (0, 0)
    for ids, fresh in windows(tokens, start, length, stride):
        if waiting and ((len(ids), fresh) != shape or len(waiting) == batch_size):
            yield torch.from_numpy(np.stack(waiting)), shape[1]
            waiting = []
        waiting.append(ids)
        shape = len(ids), fresh
    yield torch.from_numpy(np.stack(waiting)), shape[1]


def windows(
    tokens: TokenSequence, start: int, length: int, stride: int
) -> Iterator[tuple[TokenIds, int]]:
    """Inputs with the targets they lead to, at most length + 1 ids, and how many are new."""
    scored = 0
    while scored < len(tokens):
        end = min(len(tokens), scored + (stride if scored else length))
        first = max(0, end - length)  # of the targets, which are the tokens first .. end - 1
        before = tokens[first - 1 : first] if first else np.array([start])
        yield np.concatenate([before, tokens[first:end]]).astype(np.int64), end - scored
        scored = end
