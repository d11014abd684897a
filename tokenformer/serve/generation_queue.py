"""The generation side of `tokenformer serve`: requests share a continuous batch, in transformers'
inference thread.

Streamed and whole responses have the same text. Generation ends before a stop sequence, when the
client disconnects, or when the server shuts down. The seed of a request alone determines its
samples, whatever other requests are running.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from json import loads
from typing import Any, TypeVar

import torch
from starlette.exceptions import HTTPException
from transformers.cli.serving.utils import GenerateManager, _StreamError

from tokenformer.data.text_stream import TextStream
from tokenformer.serve.generation import SHUTTING_DOWN, Generation, TokenStreamer
from tokenformer.serve.generation_batch import GenerationBatch
from tokenformer.serve.limits import Limits
from tokenformer.serve.prompt import PromptError, add_start_token, remaining_context

logger = logging.getLogger("uvicorn.error")

RETRY_SECONDS = 2
"""The Retry-After that clients get when the queue is full."""

T = TypeVar("T")


class GenerationQueue(GenerateManager):
    """Requests that wait, in order, and the batch that they join in the inference thread of the
    parent class."""

    def __init__(
        self,
        model: Any,
        context: int,
        max_queue: int = Limits.max_queue,
        max_batch: int = Limits.max_batch,
        adapters: Any = None,
    ) -> None:
        super().__init__()
        self.context = context
        self.max_queue = max_queue
        self.num_encoding = 0
        self.active: set[TokenStreamer] = set()
        """Requests that are queued or generating."""
        self.waiting: deque[Generation] = deque()
        self.changes: deque[Callable[[], None]] = deque()
        """What to do at the next token boundary."""
        self.batch = GenerationBatch(model, max_batch, adapters)

    @property
    def shutting_down(self) -> bool:
        return self.batch.shutting_down

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Count a request as waiting while its prompt is encoded; refuse it if the queue is full.
        Afterwards it is in `active` until it is answered or its client disconnects."""
        if self.num_encoding + len(self.active) >= self.max_queue + self.batch.max_batch:
            message = f"{self.max_queue} requests are waiting already (--max_queue); try again"
            raise HTTPException(503, message, {"Retry-After": str(RETRY_SECONDS)})
        self.num_encoding += 1
        try:
            yield
        except Exception as error:
            if self.shutting_down:
                raise HTTPException(503, SHUTTING_DOWN) from None
            if isinstance(error, PromptError):
                raise HTTPException(400, str(error)) from None
            raise
        finally:
            self.num_encoding -= 1

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: Any,
        request_id: str,
        response_parser: Any = None,
    ) -> "tuple[asyncio.Queue[Any], TokenStreamer]":
        ids = self.fit(inputs["input_ids"], processor, gen_config).to(model.device)
        inputs["input_ids"] = ids  # the handler counts them
        queue: asyncio.Queue[Any] = asyncio.Queue()
        text = TextStream(
            processor, stop=gen_config.stop, skip_special_tokens=response_parser is None
        )
        eos = [] if gen_config.eos_token_id is None else gen_config.eos_token_id
        eos_ids = {eos} if isinstance(eos, int) else set(eos)
        streamer = TokenStreamer(text, eos_ids, queue, response_parser, self.active.discard)
        self.active.add(streamer)
        inputs["streamer"] = streamer  # for the handler to cancel
        if self.shutting_down:
            streamer.cancel()
        pixels = inputs.get("pixel_values")
        pixels = None if pixels is None else pixels.to(model.device)
        self.waiting.append(Generation(ids, gen_config, streamer, pixels))
        self.submit(self.work)
        return queue, streamer

    def work(self) -> None:
        """Generate until no request is left. Runs in the inference thread, once per request; what
        comes in meanwhile joins the batch."""
        batch = self.batch
        while self.waiting or batch.rows or self.changes:
            while self.changes:
                self.changes.popleft()()
            # One prompt per token: a burst of long prompts does not stop the others.
            if self.waiting and batch.accepts(self.waiting[0]):
                batch.add(self.waiting.popleft())
            if batch.rows:
                batch.step()

    async def change(self, function: Callable[[], T]) -> T:
        """Call a function in the inference thread, between two tokens, and return its result."""
        done: Future[T] = Future()

        def call() -> None:
            try:
                done.set_result(function())
            except Exception as error:
                done.set_exception(error)

        self.changes.append(call)
        self.submit(self.work)
        return await asyncio.wrap_future(done)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        queue, streamer = self.generate_streaming(model, processor, inputs, gen_config, request_id)
        pieces = []
        try:
            while (piece := await queue.get()) is not None:
                if isinstance(piece, _StreamError):
                    status = 503 if self.shutting_down else 500
                    raise HTTPException(status, loads(f'"{piece.msg}"'))
                pieces.append(piece)
        except asyncio.CancelledError:
            streamer.cancel()
            raise
        new_ids = streamer.text.ids[: streamer.total_tokens]
        return "".join(pieces), inputs["input_ids"].shape[1], new_ids

    def fit(self, ids: torch.Tensor, tokenizer: Any, gen_config: Any) -> torch.Tensor:
        """Return the prompt's ids and set `max_new_tokens`; refuse what exceeds the context."""
        try:
            ids = add_start_token(ids, tokenizer)
            remaining = remaining_context(ids, self.context)
        except PromptError as error:
            raise HTTPException(400, str(error)) from None
        requested = gen_config.max_new_tokens
        if requested is not None and requested > remaining:
            raise HTTPException(
                400,
                f"the prompt has {ids.shape[1]} tokens and max_tokens is {requested}, together "
                f"above the model's context of {self.context}; max_tokens can be at most "
                f"{remaining}",
            )
        gen_config.max_new_tokens = requested or remaining
        return ids

    def shut_down(self) -> None:
        """Cancel all active requests; each ends at its next token."""
        self.batch.shutting_down = True
        for streamer in list(self.active):
            streamer.cancel()

    def wait(self) -> None:
        """Block until the inference thread is idle: the interpreter must not exit while the thread
        is inside of torch."""
        self.submit(lambda: None).result()
