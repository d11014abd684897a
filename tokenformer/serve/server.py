"""The OpenAI-compatible server: transformers' server application with a single loaded model.

Routes, response formats, event streams and the inference thread are those of transformers. This
package adds:

- `SingleModelManager` instead of its `ModelManager`, which loads whatever a request names;
- `LimitRequests` (`middleware.py`) in front of all routes;
- handlers that refuse unsupported fields (`request.py`) and sample as OpenAI's API specifies;
- `PromptEncoder` (`prompt_encoder.py`), which renders and tokenizes outside of the event loop;
- `GenerationQueue` (`generation_queue.py`), which generates the text.
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
from transformers.cli.serving.utils import GenerationState

from tokenformer.errors import TokenformerError
from tokenformer.models.loading import join_names
from tokenformer.serve.generation import TokenStreamer
from tokenformer.serve.generation_queue import GenerationQueue
from tokenformer.serve.limits import Limits
from tokenformer.serve.middleware import LimitRequests, handle_error
from tokenformer.serve.prompt_encoder import PromptEncoder
from tokenformer.serve.request import (
    AdapterRequest,
    ChatRequest,
    CompletionRequest,
    Request,
    explain,
)

ROUTES = {"/health", "/v1/models", "/v1/completions", "/v1/chat/completions"}
"""Routes that are kept; the others load or unload models or need another kind of model."""


class SingleModelManager:
    """The part of transformers' `ModelManager` that its server calls; it never loads a model.
    `adapters` are more names for the model, which requests can choose."""

    def __init__(self, name: str, model: Any, tokenizer: Any, adapters: Any = None) -> None:
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        self.adapters = adapters
        self.created = int(time.time())

    @property
    def adapter_times(self) -> dict[str, int]:
        """When each adapter was loaded, by name."""
        return {} if self.adapters is None else self.adapters.served

    def get_gen_models(self) -> list[dict[str, Any]]:
        adapters = [
            self.describe(name, created, parent=self.name)
            for name, created in self.adapter_times.items()
        ]
        return [self.describe(self.name, self.created), *adapters]

    def describe(self, name: str, created: int, **more: str) -> dict[str, Any]:
        model = {"id": name, "object": "model", "created": created, "owned_by": "tokenformer"}
        return model | more

    def adapter(self, name: str | None) -> str | None:
        """Return the adapter that a request names; None for the model itself."""
        if name in (None, self.name):
            return None
        if name not in self.adapter_times:
            names = join_names([self.name, *self.adapter_times])
            raise HTTPException(404, f"no model {name}; this server has {names}")
        return name

    def shutdown(self) -> None:
        """The model is freed with the process."""


class ValidatingHandler:
    """Mixin for transformers' handlers: validates a request, encodes its prompt, sets its sampling
    options."""

    request: type[Request]
    model_manager: SingleModelManager

    def __init__(
        self, manager: SingleModelManager, queue: GenerationQueue, encoder: PromptEncoder
    ) -> None:
        super().__init__(manager, GenerationState())  # type: ignore[call-arg]
        self.queue = queue
        self.encoder = encoder

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        self._validate_request(body)
        with self.queue.admit():
            inputs = await self.encode(body)
        model, tokenizer = self.model_manager.model, self.model_manager.tokenizer
        config = self._build_generation_config(body, model.generation_config)
        config.adapter = self.model_manager.adapter(body.get("model"))  # it may be gone by now
        name = config.adapter or self.model_manager.name
        arguments = (request_id, model, tokenizer, name, inputs, config, self.queue)
        if body["stream"]:
            return self._streaming(*arguments)
        return await self._non_streaming(*arguments)  # type: ignore[attr-defined]

    async def encode(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs of the model."""
        raise NotImplementedError

    def _validate_request(self, body: dict[str, Any]) -> None:
        try:
            request = self.request.model_validate(body)
        except ValidationError as error:
            raise HTTPException(400, explain(error)) from None
        self.model_manager.adapter(request.model)
        body.clear()
        body.update(request.model_dump(exclude_none=True))

    def _build_generation_config(
        self, body: dict[str, Any], model_generation_config: Any, use_cb: bool = False
    ) -> Any:
        config = deepcopy(model_generation_config)
        config.num_beams = 1  # beam search cannot stream
        config.max_new_tokens = body.get("max_tokens")
        temperature = body.get("temperature", config.temperature)
        config.do_sample = temperature != 0
        config.temperature = temperature if config.do_sample else None
        config.top_p = body.get("top_p", config.top_p) if config.do_sample else None
        config.top_k = config.top_k or 0  # the default of transformers is 50
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
        return EventStream(with_done_event(response.body_iterator), inputs["streamer"])


class EventStream(StreamingResponse):
    """Server-sent events. Generation is cancelled when they end, also when the client leaves."""

    def __init__(self, events: AsyncIterator[str], streamer: TokenStreamer) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.streamer = streamer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.streamer.cancel()


async def with_done_event(events: Any) -> AsyncIterator[str]:
    """Yield `events`, then the event that tells OpenAI's clients that the stream is complete."""
    async with aclosing(events):
        async for event in events:
            yield event
    yield "data: [DONE]\n\n"


class ValidatingCompletionHandler(ValidatingHandler, CompletionHandler):
    request = CompletionRequest

    async def encode(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self.encoder.encode(body["prompt"])


class ValidatingChatHandler(ValidatingHandler, ChatCompletionHandler):
    request = ChatRequest

    async def encode(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self.encoder.encode_chat(body["messages"])


def add_adapter_routes(app: FastAPI, manager: SingleModelManager, queue: GenerationQueue) -> None:
    """Let clients load adapters from the folder of `--allow_adapter_changes` and remove them."""
    adapters = manager.adapters

    @app.post("/v1/adapters")
    async def load(body: dict[str, Any]) -> dict[str, Any]:
        try:
            request = AdapterRequest.model_validate(body)
        except ValidationError as error:
            raise HTTPException(400, explain(error)) from None
        if request.name == manager.name or request.name in adapters.served:
            raise HTTPException(409, f"there is a model {request.name} already")
        try:
            await adapters.add(queue, request.name, request.folder)
        except TokenformerError as error:
            raise HTTPException(400, str(error)) from None
        created = adapters.served[request.name]
        return manager.describe(request.name, created, parent=manager.name)

    @app.delete("/v1/adapters/{name:path}")
    async def remove(name: str) -> dict[str, Any]:
        if manager.adapter(name) is None:
            raise HTTPException(400, f"{name} is the model itself, which cannot be removed")
        try:
            await adapters.delete(queue, name)
        except TokenformerError as error:
            raise HTTPException(409, str(error)) from None
        return {"id": name, "object": "model", "deleted": True}


def build_app(
    name: str,
    model: Any,
    tokenizer: Any,
    queue: GenerationQueue,
    encoder: PromptEncoder,
    limits: Limits,
    adapters: Any = None,
) -> FastAPI:
    """Return the application that serves `model` as `name`, with `ServedAdapters`."""
    manager = SingleModelManager(name, model, tokenizer, adapters)
    app: FastAPI = build_server(
        manager,
        ValidatingChatHandler(manager, queue, encoder),
        completion_handler=ValidatingCompletionHandler(manager, queue, encoder),
        response_handler=None,
        transcription_handler=None,
        systemone_handler=None,
        generation_state=GenerationState(),
    )
    app.router.routes[:] = [r for r in app.router.routes if getattr(r, "path", None) in ROUTES]
    if adapters is not None and adapters.root is not None:
        add_adapter_routes(app, manager, queue)
    for kind in (HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, handle_error)
    app.add_middleware(LimitRequests, limits=limits)
    return app
