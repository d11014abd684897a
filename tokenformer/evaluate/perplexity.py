"""Perplexity of a causal language model over a text, with sliding windows.

A window has `length` tokens and starts `stride` after the previous one; it scores only the tokens
that are new. So every token is scored once, with at least `length - stride` tokens of context where
that many exist. The text follows an end-of-text token, so its first token is predicted like that of
any document.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer.data.corpus import TokenIds, TokenSequence
from tokenformer.errors import DataError
from tokenformer.evaluate.tokenized_text import TokenizedText

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGIT_BYTES = 1 << 28
GPU_LOGIT_SHARE = 16
"""Logits may take this fraction (1/16) of a GPU's memory."""
MAX_TOKENS = 1 << 13
GPU_MAX_TOKENS = 1 << 15
"""Larger batches are not faster."""


@dataclass(frozen=True)
class Perplexity:
    nats: float
    """Negative log-likelihood of the whole text."""
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
        """Return all values for JSON, with None for infinity."""
        names = ("token_perplexity", "word_perplexity", "bits_per_byte")
        values = asdict(self) | {name: getattr(self, name) for name in names}
        return {name: value if math.isfinite(value) else None for name, value in values.items()}


def perplexity_of(nats: float, count: int) -> float:
    """exp(nats / count), or infinity if that overflows (few words, a bad model)."""
    try:
        return math.exp(nats / count) if count else math.inf
    except OverflowError:
        return math.inf


def max_batch_tokens(model: "PreTrainedModel") -> int:
    """Return how many tokens to run in one forward pass, by the memory of their logits. The result
    depends only on the device and the vocabulary, so that batches are reproducible."""
    tokens, memory = MAX_TOKENS, LOGIT_BYTES
    if model.device.type == "cuda":
        properties = torch.cuda.get_device_properties(model.device)
        tokens, memory = GPU_MAX_TOKENS, properties.total_memory // GPU_LOGIT_SHARE
    vocab_size = model.config.get_text_config().vocab_size
    return max(1, min(tokens, memory // (4 * vocab_size)))


@torch.no_grad()
def measure_perplexity(
    model: "PreTrainedModel",
    text: TokenizedText,
    *,
    start: int,
    length: int,
    stride: int | None = None,
    batch_size: int | None = None,
    on_tokens: Callable[[int], None] = lambda tokens: None,
) -> Perplexity:
    """Measure the perplexity of `text` after the token `start`.

    `model` is any Hugging Face causal language model. `stride` defaults to half of `length`.
    `on_tokens` receives the number of tokens scored so far.
    """
    stride = stride or max(1, length // 2)
    if not 1 <= stride <= length:
        raise ValueError(f"stride={stride} must be from 1 to length={length}")
    if len(text.tokens) == 0:
        raise ValueError("the text is empty")
    if batch_size is None:
        batch_size = max(1, max_batch_tokens(model) // length)
    device, was_training = model.device, model.training
    model.eval()
    nats, scored = 0.0, 0
    for ids, new in batches(text.tokens, start, length, stride, batch_size):
        try:
            logits = model(input_ids=ids[:, :-1].to(device), use_cache=False).logits[:, -new:]
        except (IndexError, ValueError):  # a model with learned position embeddings
            positions = getattr(model.config, "max_position_embeddings", length)
            if length <= positions:
                raise
            raise DataError(
                f"the model has {positions} positions, too few for windows of {length} tokens; "
                f"use --length {positions} or less"
            ) from None
        targets = ids[:, -new:].to(device)
        losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        nats += losses.double().sum().item()
        scored += losses.numel()
        on_tokens(scored)
    model.train(was_training)
    assert scored == len(text.tokens)
    return Perplexity(nats, scored, text.bytes, text.words)


def batches(
    tokens: TokenSequence, start: int, length: int, stride: int, batch_size: int
) -> Iterator[tuple[Tensor, int]]:
    """Yield batches of windows of equal shape: ids [B, inputs + 1], and how many of the last tokens
    to score."""
    batch: list[TokenIds] = []
    shape = (0, 0)
    for ids, new in windows(tokens, start, length, stride):
        if batch and ((len(ids), new) != shape or len(batch) == batch_size):
            yield torch.from_numpy(np.stack(batch)), shape[1]
            batch = []
        batch.append(ids)
        shape = len(ids), new
    yield torch.from_numpy(np.stack(batch)), shape[1]


def windows(
    tokens: TokenSequence, start: int, length: int, stride: int
) -> Iterator[tuple[TokenIds, int]]:
    """Yield each window's ids, at most length + 1 with inputs and targets, and how many targets are
    new."""
    scored = 0
    while scored < len(tokens):
        end = min(len(tokens), scored + (stride if scored else length))
        first = max(0, end - length)  # the targets are tokens first .. end - 1
        before = tokens[first - 1 : first] if first else np.array([start])
        yield np.concatenate([before, tokens[first:end]]).astype(np.int64), end - scored
        scored = end
