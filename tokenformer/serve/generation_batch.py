"""A continuous batch: requests join and leave it between two tokens."""

from contextlib import nullcontext
from typing import Any

from tokenformer.models.batch_decoder import BatchDecoder
from tokenformer.serve.generation import Generation


class GenerationBatch:
    """The requests that are generating. All methods run in the inference thread.

    Requests whose model or settings `BatchDecoder` and `Sampler` do not support run alone, in
    `model.generate`. Requests with adapters that cannot mix share a batch with those of the same.
    """

    def __init__(self, model: Any, max_batch: int, adapters: Any = None) -> None:
        self.model = model
        self.adapters = adapters
        self.decoder: BatchDecoder | None = None
        if BatchDecoder.supports(model):
            select = None if adapters is None else adapters.select
            self.decoder = BatchDecoder(model, max_batch, select)
        self.max_batch = max_batch if self.decoder is not None else 1
        self.rows: list[Generation] = []
        self.shutting_down = False

    def accepts(self, request: Generation) -> bool:
        """Whether a request can start now."""
        if not self.rows:
            return True
        if len(self.rows) == self.max_batch or self.decoder is None or not request.is_batched:
            return False
        mixes = self.adapters is None or self.adapters.mixes
        return mixes or request.adapter == self.rows[0].adapter

    def add(self, request: Generation) -> None:
        """Start a request: run its prompt and take its first token, or all if it runs alone."""
        try:
            request.streamer.check_cancelled()  # it may have been cancelled in the queue
            if self.decoder is None or not request.is_batched:
                self.run_alone(request)
                return
            request.start(self.model)
            logits = self.decoder.add(request.ids, request.adapter, **request.images)
        except Exception as error:
            request.stop(error, self.shutting_down)
            return
        self.rows.append(request)
        if self.is_done(request, logits):
            self.remove(len(self.rows) - 1)

    def run_alone(self, request: Generation) -> None:
        select = nullcontext(self.model)
        if self.adapters is not None:
            select = self.adapters.select([request.adapter])
        with select as model:
            request.run_alone(model)

    def step(self) -> None:
        """Take the next token of every request."""
        assert self.decoder is not None
        greedy = all(row.sampler is not None and row.sampler.is_plain for row in self.rows)
        try:
            logits, best = self.decoder.step([row.token for row in self.rows], greedy)
        except Exception as error:  # it is not known for which of them
            self.decoder.clear()
            for row in self.rows:
                row.stop(error, self.shutting_down)
            self.rows = []
            return
        tokens = [None] * len(self.rows) if best is None else best.tolist()
        done = [
            index
            for index, (row, token) in enumerate(zip(self.rows, tokens, strict=True))
            if self.is_done(row, logits[index : index + 1], token)
        ]
        for index in reversed(done):
            self.remove(index)

    def is_done(self, request: Generation, logits: Any, best: int | None = None) -> bool:
        """Take a token; return whether the request has ended, which its client knows then."""
        try:
            if not request.take(logits, best):
                return False
            request.streamer.end()
        except Exception as error:
            request.stop(error, self.shutting_down)
        return True

    def remove(self, index: int) -> None:
        assert self.decoder is not None
        self.decoder.remove(index)
        last = self.rows.pop()
        if index < len(self.rows):
            self.rows[index] = last
