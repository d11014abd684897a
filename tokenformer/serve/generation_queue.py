"""The generation side of `tokenformer serve`: one request at a time, in transformers' inference
thread.

Streamed and whole responses have the same text. Generation ends before a stop sequence, when the
client disconnects, or when the server shuts down. The seed of a request alone determines its
samples, whatever other requests are running.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from json import dumps, loads
from typing import Any

import torch
from starlette.exceptions import HTTPException
from transformers.cli.serving.utils import (
    DirectStreamer,
    GenerateManager,
    _GenerationCancelled,
    _StreamError,
    response_events_to_chunks,
)

from tokenformer.data.text_stream import TextStream
from tokenformer.serve.limits import Limits
from tokenformer.serve.prompt import PromptError, add_start_token, remaining_context

logger = logging.getLogger("uvicorn.error")

RETRY_SECONDS = 2
"""The Retry-After that clients get when the queue is full."""


class TokenStreamer(DirectStreamer):
    """Decodes the tokens of `model.generate` and puts the text on a queue of the event loop."""

    def __init__(
        self,
        text: TextStream,
        eos_ids: set[int],
        queue: "asyncio.Queue[Any]",
        parser: Any,
        on_cancel: "Callable[[TokenStreamer], None]",
    ) -> None:
        super().__init__(text.tokenizer, asyncio.get_running_loop(), queue, parser)
        self.text = text
        self.eos_ids = eos_ids
        self.on_cancel = on_cancel
        self.prompt_seen = False

    def cancel(self) -> None:
        super().cancel()
        self.on_cancel(self)

    def check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise _GenerationCancelled

    def put(self, value: torch.Tensor) -> None:
        self.check_cancelled()
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        token = int(value.item())
        self.emit(self.text.add(token))
        if self.text.stopped:
            raise _GenerationCancelled
        # End-of-text tokens are not counted, so that only a full count means "length".
        self.total_tokens += token not in self.eos_ids

    def end(self) -> None:
        self.emit(self.text.end())
        super().end()

    def emit(self, text: str) -> None:
        if self._parser is not None:  # a chat model whose responses have parts
            for part in response_events_to_chunks(self._parser.feed(text)):
                self._enqueue(part)
        elif text:
            self._enqueue(text)


class GenerationQueue(GenerateManager):
    """Runs requests one after the other in the inference thread of its parent class."""

    def __init__(self, context: int, max_queue: int = Limits.max_queue) -> None:
        super().__init__()
        self.context = context
        self.max_queue = max_queue
        self.num_encoding = 0
        self.active: set[TokenStreamer] = set()
        """Requests that are queued or generating."""
        self.shutting_down = False

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Count a request as waiting while its prompt is encoded; refuse it if the queue is full.
        Afterwards it is in `active` until it is answered or its client disconnects."""
        if self.num_encoding + len(self.active) > self.max_queue:
            message = f"{self.max_queue} requests are waiting already (--max_queue); try again"
            raise HTTPException(503, message, {"Retry-After": str(RETRY_SECONDS)})
        self.num_encoding += 1
        try:
            yield
        except Exception as error:
            if self.shutting_down:
                raise HTTPException(503, "the server is shutting down") from None
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
        seed = gen_config.seed

        def generate() -> None:
            try:
                streamer.check_cancelled()  # it may have been cancelled in the queue
                # Seeded in the inference thread: until now it may have sampled for other requests.
                torch.manual_seed(torch.seed() if seed is None else seed)
                model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=gen_config,
                    streamer=streamer,
                )
            except _GenerationCancelled:
                if self.shutting_down:
                    streamer._enqueue(_StreamError("the server is shutting down"))
                streamer.end()
            except Exception as error:
                logger.exception("a request failed")
                # transformers inserts the message into JSON unescaped.
                streamer._enqueue(_StreamError(dumps(str(error))[1:-1]))
            finally:
                self.active.discard(streamer)

        self.active.add(streamer)
        inputs["streamer"] = streamer  # for the handler to cancel
        if self.shutting_down:
            streamer.cancel()
        self.submit(generate)
        return queue, streamer

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
        self.shutting_down = True
        for streamer in list(self.active):
            streamer.cancel()

    def wait(self) -> None:
        """Block until the inference thread is idle: the interpreter must not exit while the thread
        is inside of torch."""
        self.submit(lambda: None).result()
