"""A causal language model for lm-evaluation-harness, with cached responses.

lm-eval's own Hugging Face model computes the log-likelihoods. `HarnessModel` sorts requests by
length, batches as many as fit in memory and caches each batch. A continuation longer than the
context, which lm-eval cannot score, is scored in windows.
"""

import io
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tokenformer.errors import DataError
from tokenformer.evaluate.perplexity import max_batch_tokens, windows
from tokenformer.evaluate.response_cache import Response, ResponseCache, batch_key, fingerprint

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DISABLE_PROCESSES = "DISABLE_MULTIPROC"
"""The environment variable that keeps lm-eval from forking this process, which holds a model."""

Ids = list[int]


class HarnessModel:
    """The model that `lm_eval.evaluate` takes. `on_requests` receives how many requests are done,
    and how many there are."""

    rank, world_size = 0, 1

    def __init__(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        cache_folder: Path,
        *,
        batch_size: int | None = None,
        on_requests: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        from lm_eval.models.huggingface import HFLM

        if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
            raise DataError(
                "the model's tokenizer has neither a beginning-of-text nor an end-of-text token"
            )
        with silence_lm_eval():
            self.lm = HFLM(pretrained=model, tokenizer=tokenizer, softmax_dtype=torch.float32)
        self.batch_size = batch_size
        self.on_requests = on_requests
        self.max_batch_tokens = max_batch_tokens(model)
        self.truncated = 0
        """Requests so far that were longer than the model's context."""
        settings = {"max_length": self.lm.max_length, "prefix": self.lm.prefix_token_id}
        self.cache = ResponseCache(cache_folder / f"{fingerprint(model, **settings)}.jsonl")

    def loglikelihood(self, requests: "Sequence[Instance]") -> list[Response]:
        """Return the log-likelihood of each continuation after its context, and whether greedy
        decoding produces it."""
        pairs = [self.encode(*request.args) for request in requests]
        max_length = self.lm.max_length
        self.truncated += sum(len(c) + len(answer) > max_length + 1 for c, answer in pairs)
        responses: list[Response] = [(0.0, False)] * len(requests)
        done = 0
        for indices in self.batches(pairs):
            key = batch_key([pairs[index] for index in indices])
            batch = self.cache.get(key)
            if batch is None:
                first = pairs[indices[0]]
                if len(first[1]) > max_length:
                    batch = [self.score_in_windows(*first)]
                else:
                    batch = self.score([requests[index] for index in indices])
                self.cache.add(key, batch)
            for index, response in zip(indices, batch, strict=True):
                responses[index] = response
            done += len(indices)
            self.on_requests(done, len(requests))
        return responses

    def loglikelihood_rolling(self, requests: "Sequence[Instance]") -> list[float]:
        return self.delegate("loglikelihood_rolling", requests)

    def generate_until(self, requests: "Sequence[Instance]") -> list[str]:
        return self.delegate("generate_until", requests)

    def delegate(self, method: str, requests: "Sequence[Instance]") -> list[Any]:
        """Pass requests of unknown length to lm-eval's model, in batches that fit at full
        length."""
        rows = self.batch_size or max(1, self.max_batch_tokens // self.lm.max_length)
        self.lm.batch_size_per_gpu = rows
        responses: list[Any] = getattr(self.lm, method)(requests, disable_tqdm=True)
        self.on_requests(len(requests), len(requests))
        return responses

    def encode(self, context: str, continuation: str) -> tuple[Ids, Ids]:
        """Tokenize as lm-eval does: both together, then cut where the context without its trailing
        spaces ends. An empty context is the beginning-of-text token."""
        if not context:
            return [self.lm.prefix_token_id], self.lm.tok_encode(
                continuation, add_special_tokens=False
            )
        whole = self.lm.tok_encode(context + continuation)
        cut = len(self.lm.tok_encode(context.rstrip()))
        return whole[:cut], whole[cut:]

    def batches(self, pairs: Sequence[tuple[Ids, Ids]]) -> Iterator[list[int]]:
        """Yield batches of request indices, longest first, so that a batch has about one length. A
        continuation longer than the context is a batch of its own."""
        order = sorted(
            range(len(pairs)),
            key=lambda index: (-len(pairs[index][0] + pairs[index][1]), pairs[index]),
        )
        max_length = self.lm.max_length
        yield from ([index] for index in order if len(pairs[index][1]) > max_length)
        order = [index for index in order if len(pairs[index][1]) <= max_length]
        while order:
            longest = min(sum(map(len, pairs[order[0]])), max_length)
            rows = self.batch_size or max(1, self.max_batch_tokens // longest)
            yield order[:rows]
            order = order[rows:]

    def score(self, batch: "Sequence[Instance]") -> list[Response]:
        """Score a batch at once, or in halves if a GPU runs out of memory."""
        try:
            self.lm.batch_size_per_gpu = len(batch)
            responses: list[Response] = self.lm.loglikelihood(batch, disable_tqdm=True)
            return responses
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise
        half = len(batch) // 2
        return self.score(batch[:half]) + self.score(batch[half:])

    @torch.no_grad()
    def score_in_windows(self, context: Ids, continuation: Ids) -> Response:
        """Score each token of a long continuation once, after at least half a window."""
        length = self.lm.max_length
        tokens = np.array([*context[1:], *continuation])
        unscored, total, greedy = len(context) - 1, 0.0, True  # the context is not scored
        for ids, new in windows(tokens, context[0], length, max(1, length // 2)):
            count = new - min(new, unscored)
            unscored -= new - count
            if count:
                inputs = torch.from_numpy(ids).to(self.lm.device)
                logits = self.lm.model(inputs[None, :-1]).logits[0, -count:].float()
                targets = inputs[-count:, None]
                total += logits.log_softmax(-1).gather(1, targets).double().sum().item()
                greedy &= bool((logits.argmax(-1, keepdim=True) == targets).all())
        return total, greedy


@contextmanager
def silence_lm_eval() -> Iterator[None]:
    """Hide the log, output and progress bars of lm-eval, and keep it from starting processes to
    resample."""
    logger, before = logging.getLogger("lm_eval"), os.environ.get(DISABLE_PROCESSES)
    level = logger.level
    logger.setLevel(logging.ERROR)
    os.environ[DISABLE_PROCESSES] = "1"
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
        if before is None:
            del os.environ[DISABLE_PROCESSES]
        else:
            os.environ[DISABLE_PROCESSES] = before
