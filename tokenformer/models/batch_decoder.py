"""Decoding of several sequences together, which join and leave between two tokens.

    decoder = BatchDecoder(model, max_batch=16)
    logits = decoder.add(ids)               # [1, T] -> [1, vocab_size], after the prompt
    logits, best = decoder.step(tokens)     # one token of every sequence -> [B, vocab_size]
    decoder.remove(0)                       # the last sequence takes its place

Every sequence has its own prompt, position and, if `select` is given, adapter. Prompts run alone;
after them a step runs in native code where that supports the model, and in eager mode elsewhere.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from tokenformer.models import language  # first: it and the native decoder import each other
from tokenformer.models.batch_cache import BatchCache
from tokenformer.models.decoding_loop import is_overridden
from tokenformer.models.kv_cache import preallocate
from tokenformer.models.native_decoder import (
    MAX_BATCH,
    CausalDecoder,
    CausalSession,
    decoder_of,
    is_supported,
)

Select = Callable[[Sequence[str | None]], AbstractContextManager[Any]]
"""Returns the model to call for sequences with these adapters, None for none."""


class BatchDecoder:
    def __init__(self, model: Any, max_batch: int, select: Select | None = None) -> None:
        self.max_batch = max_batch
        self.select = select or partial(always, model)
        self.device = model.device
        self.adapters: list[str | None] = []
        """The adapter of every sequence."""
        self.batch = BatchCache(max_batch)
        self.session: CausalSession | None = None

    @staticmethod
    def supports(model: Any) -> bool:
        """Whether a model can decode in batches: other architectures may need another cache."""
        return isinstance(model, language.LanguageModelForCausalLM) and not is_overridden(model)

    def __len__(self) -> int:
        return len(self.adapters)

    @torch.no_grad()
    def add(self, ids: Tensor, adapter: str | None = None, **images: Tensor) -> Tensor:
        """Run the prompt ids [1, T] of a sequence, which is the last one from then on; return the
        logits [1, vocab_size] of its next token. If that raises, nothing has changed. `images` are
        the `pixel_values` of a vision-language model."""
        with self.select([adapter]) as model:
            cache = preallocate(DynamicCache(config=model.config))
            outputs = model(
                input_ids=ids.to(self.device),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
                return_dict=True,
                **images,
            )
        self.batch.add(cache)
        self.adapters.append(adapter)
        self.session = None
        return last_logits(outputs)

    def remove(self, row: int) -> None:
        """Remove a sequence; the last one takes its place."""
        self.batch.remove(row)
        last = self.adapters.pop()
        if row < len(self.adapters):
            self.adapters[row] = last
        self.session = None

    def clear(self) -> None:
        """Remove all sequences, also after a step that failed."""
        self.batch, self.adapters, self.session = BatchCache(self.max_batch), [], None

    @torch.no_grad()
    def step(self, tokens: Sequence[int], greedy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Append a token to every sequence; return the logits [B, vocab_size] of the next ones,
        valid until the next call, and with `greedy` the best ids [B] if native code has them."""
        if self.batch.reserve():
            self.session = None
        ids = torch.tensor(tokens, device=self.device)
        with self.select(self.adapters) as model:
            found = self.step_native(model, ids, greedy)
            if found is not None:
                return found[0], found[1] if greedy else None
            positions = torch.tensor(self.batch.positions(), device=self.device)
            outputs = model(
                input_ids=ids[:, None],
                attention_mask=self.batch.mask(),
                position_ids=positions[:, None],
                past_key_values=self.batch.cache,
                use_cache=True,
                return_dict=True,
            )
        return last_logits(outputs), None

    def step_native(self, model: Any, ids: Tensor, greedy: bool) -> tuple[Tensor, Tensor] | None:
        if len(ids) > MAX_BATCH or not is_supported(ids[:1, None].float()):
            return None
        decoder = decoder_of(model)
        if decoder is None:
            return None
        assert isinstance(decoder, CausalDecoder)
        session = self.session
        if session is None or session.decoder is not decoder:
            starts, positions = (
                torch.tensor(self.batch.starts),
                torch.tensor(self.batch.positions()),
            )
            session = CausalSession(decoder, starts, positions)
        found = session.decode(ids, self.batch.tensors, greedy)
        session.offset += 1
        self.session = None if found is None else session
        return found


def always(model: Any, adapters: Sequence[str | None]) -> AbstractContextManager[Any]:
    """The selection of a model without adapters."""
    return nullcontext(model)


def last_logits(outputs: Any) -> Tensor:
    logits: Tensor = outputs.logits[:, -1]
    return logits.to(torch.float32, copy=True)
