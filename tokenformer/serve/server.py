"""The OpenAI-compatible server of transformers with one model of ours in it.

Its routes, response formats, event streams and inference thread are used as they are. Ours are:

- `OneModel` in the place of its `ModelManager`, which loads what a request names;
- `LimitRequests` (`middleware.py`) in front of all routes;
- handlers that refuse unsupported fields (`request.py`), and sample as OpenAI's API says;
- `PromptEncoder` (`encoder.py`), which renders and tokenizes outside of the event loop;
- `GenerationQueue` (`voice.py`), which generates the text.
"""

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from copy import deepcopy
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import GenerationState, Modality

from tokenformer.serve.generation_queue import GenerationQueue, TokenStreamer
from tokenformer.serve.limits import Limits
from tokenformer.serve.middleware import LimitRequests, handle_error
from tokenformer.serve.prompt_encoder import PromptEncoder
from tokenformer.serve.request import ChatRequest, CompletionRequest, Request, explain

ROUTES = {"/health", "/v1/models", "/v1/completions", "/v1/chat/completions"}
"""Those of transformers' that stay: others load, unload or need another kind of model."""


class OneModel:
    """All that transformers' server asks of a `ModelManager`, and nothing that loads a model."""

    def __init__(self, name: str, model: Any, tokenizer: Any) -> None:
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        self.created = int(time.time())

    def get_gen_models(self) -> list[dict[str, Any]]:
        about = {"object": "model", "created": self.created, "owned_by": "tokenformer"}
        return [{"id": self.name, **about}]

    def shutdown(self) -> None:
        """The model goes with the process."""


class Strict:
    """What both handlers of transformers get in front of them."""

    request: type[Request]
    model_manager: OneModel

    def __init__(self, model: OneModel, voice: GenerationQueue, encoder: PromptEncoder) -> None:
        super().__init__(model, GenerationState())  # type: ignore[call-arg]
        self.voice = voice
        self.encoder = encoder

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        self._validate_request(body)
        one = self.model_manager
        with self.voice.admit():
            inputs = {"input_ids": await self.encode(body)}
        config = self._build_generation_config(body, one.model.generation_config)
        about = (request_id, one.model, one.tokenizer, one.name, inputs, config, self.voice)
        if body["stream"]:
            return self._streaming(*about)
        return await self._non_streaming(*about)  # type: ignore[attr-defined]

    async def encode(self, body: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _validate_request(self, body: dict[str, Any]) -> None:
        try:
            asked = self.request.model_validate(body)
        except ValidationError as error:
            raise HTTPException(400, explain(error)) from None
        name = self.model_manager.name
        if asked.model not in (None, name):
            raise HTTPException(404, f"the model {asked.model} is not here; this server has {name}")
        body.clear()
        body.update(asked.model_dump(exclude_none=True))

    def _build_generation_config(
        self, body: dict[str, Any], model_generation_config: Any, use_cb: bool = False
    ) -> Any:
        config = deepcopy(model_generation_config)
        config.num_beams = 1  # no text is certain before the last beam is
        config.max_new_tokens = body.get("max_tokens")
        temperature = body.get("temperature", config.temperature)
        config.do_sample = temperature != 0
        config.temperature = temperature if config.do_sample else None
        config.top_p = body.get("top_p", config.top_p) if config.do_sample else None
        config.top_k = config.top_k or 0  # else transformers takes the 50 likeliest
        # Read by `GenerationQueue`; transformers has no such fields.
        config.stop = body["stop"]
        config.seed = body.get("seed")
        return config

    def _streaming(
        self,
        request_id: str,
        model: Any,
        processor: Any,
        model_id: str,
        inputs: dict[str, Any],
        *args: Any,
    ) -> "EventStream":
        response = super()._streaming(  # type: ignore[misc]
            request_id, model, processor, model_id, inputs, *args
        )
        return EventStream(then_done(response.body_iterator), inputs["speaker"])


class EventStream(StreamingResponse):
    """Server-sent events. Generation is cancelled whenever they end, sent or not."""

    def __init__(self, events: AsyncIterator[str], speaker: TokenStreamer) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.speaker = speaker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.speaker.cancel()


async def then_done(events: Any) -> AsyncIterator[str]:
    """The event by which clients of OpenAI's API know the end from a broken connection."""
    async with aclosing(events):
        async for event in events:
            yield event
    yield "data: [DONE]\n\n"


class Completions(Strict, CompletionHandler):
    request = CompletionRequest

    async def encode(self, body: dict[str, Any]) -> Any:
        return await self.encoder.encode(body["prompt"])


class Chat(Strict, ChatCompletionHandler):
    request = ChatRequest

    async def encode(self, body: dict[str, Any]) -> Any:
        messages = self.get_processor_inputs_from_messages(body["messages"], Modality.LLM)
        return await self.encoder.encode_chat(messages)


def build_app(
    name: str,
    model: Any,
    tokenizer: Any,
    voice: GenerationQueue,
    encoder: PromptEncoder,
    limits: Limits,
) -> FastAPI:
    """The application that answers for `model` under `name`."""
    one = OneModel(name, model, tokenizer)
    app: FastAPI = build_server(
        one,
        Chat(one, voice, encoder),
        completion_handler=Completions(one, voice, encoder),
        response_handler=None,
        transcription_handler=None,
        systemone_handler=None,
        generation_state=GenerationState(),
    )
    app.router.routes[:] = [r for r in app.router.routes if getattr(r, "path", None) in ROUTES]
    for kind in (HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, handle_error)
    app.add_middleware(LimitRequests, limits=limits)
    return app
