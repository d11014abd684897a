"""How `tokenformer serve` speaks: one answer after the other, in transformers' inference thread.

What is streamed and what is not are the same text. It ends before a stop sequence, when the client
has gone, or when the server is told to end; the request's seed decides it, whoever else asks.
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
from tokenformer.serve.prompt import PromptError, begin, room

logger = logging.getLogger("uvicorn.error")

RETRY_SECONDS = 2
"""After which a client may try again when the queue is full."""


class TokenStreamer(DirectStreamer):
    """What `generate` hands its tokens to; the event loop takes text from its queue."""

    def __init__(
        self,
        text: TextStream,
        ends: set[int],
        queue: "asyncio.Queue[Any]",
        parser: Any,
        on_cancel: "Callable[[TokenStreamer], None]",
    ) -> None:
        super().__init__(text.tokenizer, asyncio.get_running_loop(), queue, parser)
        self.text = text
        self.ends = ends
        self.on_cancel = on_cancel
        self.prompted = False

    def cancel(self) -> None:
        super().cancel()
        self.on_cancel(self)

    def check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise _GenerationCancelled

    def put(self, value: torch.Tensor) -> None:
        self.check_cancelled()
        if not self.prompted:
            self.prompted = True
            return
        token = int(value.item())
        self.say(self.text.add(token))
        if self.text.stopped:
            raise _GenerationCancelled
        # What ends an answer is not counted, so that only a full count means "length".
        self.total_tokens += token not in self.ends

    def end(self) -> None:
        self.say(self.text.end())
        super().end()

    def say(self, text: str) -> None:
        if self._parser is not None:  # of a chat model whose answers have parts
            for part in response_events_to_chunks(self._parser.feed(text)):
                self._enqueue(part)
        elif text:
            self._enqueue(text)


class GenerationQueue(GenerateManager):
    """Answers one request after the other, each in the thread that its parent keeps."""

    def __init__(self, context: int, max_queue: int = Limits.max_queue) -> None:
        super().__init__()
        self.context = context
        self.max_queue = max_queue
        self.encoding = 0
        self.speaking: set[TokenStreamer] = set()
        self.hushed = False

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Around the encoding of a request, which counts as waiting; refused if the queue is full.
        Afterwards it is among `speaking` until it is answered or its client has disconnected."""
        if self.encoding + len(self.speaking) > self.max_queue:
            message = f"{self.max_queue} requests are waiting already (--max_queue); try again"
            raise HTTPException(503, message, {"Retry-After": str(RETRY_SECONDS)})
        self.encoding += 1
        try:
            yield
        except Exception as error:
            if self.hushed:
                raise HTTPException(503, "the server is shutting down") from None
            if isinstance(error, PromptError):
                raise HTTPException(400, str(error)) from None
            raise
        finally:
            self.encoding -= 1

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
        ends = [] if gen_config.eos_token_id is None else gen_config.eos_token_id
        ends = {ends} if isinstance(ends, int) else set(ends)
        speaker = TokenStreamer(text, ends, queue, response_parser, self.speaking.discard)
        seed = gen_config.seed

        def speak() -> None:
            try:
                speaker.check_cancelled()  # while it waited
                # Here rather than where the request came in: others may be sampling until now.
                torch.manual_seed(torch.seed() if seed is None else seed)
                model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=gen_config,
                    streamer=speaker,
                )
            except _GenerationCancelled:
                if self.hushed:
                    speaker._enqueue(_StreamError("the server is shutting down"))
                speaker.end()
            except Exception as error:
                logger.exception("a request failed")
                speaker._enqueue(_StreamError(dumps(str(error))[1:-1]))  # put into JSON as it is
            finally:
                self.speaking.discard(speaker)

        self.speaking.add(speaker)
        inputs["speaker"] = speaker  # for the handler to cancel
        if self.hushed:
            speaker.cancel()
        self.submit(speak)
        return queue, speaker

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        queue, speaker = self.generate_streaming(model, processor, inputs, gen_config, request_id)
        pieces = []
        try:
            while (piece := await queue.get()) is not None:
                if isinstance(piece, _StreamError):
                    raise HTTPException(503 if self.hushed else 500, loads(f'"{piece.msg}"'))
                pieces.append(piece)
        except asyncio.CancelledError:
            speaker.cancel()
            raise
        said = speaker.text.ids[: speaker.total_tokens]
        return "".join(pieces), inputs["input_ids"].shape[1], said

    def fit(self, ids: torch.Tensor, tokenizer: Any, gen_config: Any) -> torch.Tensor:
        """The prompt's ids, if the context holds them and the answer asked for."""
        try:
            ids = begin(ids, tokenizer)
            left = room(ids, self.context)
        except PromptError as error:
            raise HTTPException(400, str(error)) from None
        asked = gen_config.max_new_tokens
        if asked is not None and asked > left:
            raise HTTPException(
                400,
                f"the prompt has {ids.shape[1]} tokens and max_tokens is {asked}, together above "
                f"the model's context of {self.context}; max_tokens can be at most {left}",
            )
        gen_config.max_new_tokens = asked or left
        return ids

    def hush(self) -> None:
        """End all answers at their next token."""
        self.hushed = True
        for speaker in list(self.speaking):
            speaker.cancel()

    def wait(self) -> None:
        """Until the thread is idle: the interpreter must not end while it is inside of torch."""
        self.submit(lambda: None).result()
