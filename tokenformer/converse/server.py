"""The OpenAI-compatible server of transformers with one model of ours in it.

Its routes, chat templates, event streams and inference thread are used as they are. Ours are:

- `OneModel` in the place of its `ModelManager`, which loads what a request names;
- handlers that refuse what theirs ignore (`request.py`), and sample as OpenAI's API says;
- `Voice` (`voice.py`), which makes the text.
"""

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from copy import deepcopy
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from pydantic import ValidationError
from starlette.exceptions import HTTPException as AnyHTTPException
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import GenerationState, Modality

from tokenformer.converse.request import ChatRequest, CompletionRequest, Request, explain
from tokenformer.converse.voice import Voice

ROUTES = {"/health", "/v1/models", "/v1/completions", "/v1/chat/completions"}
"""Those of transformers' that stay: others load, unload or need another kind of model."""


class OneModel:
    """All that the handlers ask of a `ModelManager`, and nothing that could load a model."""

    def __init__(self, name: str, model: Any, tokenizer: Any) -> None:
        self.force_model = name
        self.model = model
        self.tokenizer = tokenizer
        self.created = int(time.time())

    def process_model_name(self, name: str) -> str:
        return name

    def load_model_and_processor(self, name: str, **options: Any) -> tuple[Any, Any]:
        return self.model, self.tokenizer

    def get_model_modality(self, model: Any, processor: Any = None) -> Modality:
        return Modality.LLM

    def get_gen_models(self) -> list[dict[str, Any]]:
        about = {"object": "model", "created": self.created, "owned_by": "tokenformer"}
        return [{"id": self.force_model, **about}]

    def shutdown(self) -> None:
        """The model goes with the process."""


class OneVoice(GenerationState):
    """Where the handlers find the `Voice`."""

    def __init__(self, voice: Voice) -> None:
        super().__init__()
        self.voice = voice

    def get_manager(self, model_id: str, use_cb: bool = False) -> Voice:
        return self.voice


class Strict:
    """What both handlers of transformers get in front of them."""

    request: type[Request]
    model_manager: OneModel

    def _validate_request(self, body: dict[str, Any]) -> None:
        try:
            asked = self.request.model_validate(body)
        except ValidationError as error:
            raise HTTPException(400, explain(error)) from None
        name = self.model_manager.force_model
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
        # Read by `Voice`; transformers has no such fields.
        config.stop = body["stop"]
        config.seed = body.get("seed")
        return config

    def _streaming(self, *args: Any, **options: Any) -> Any:
        response = super()._streaming(*args, **options)  # type: ignore[misc]
        response.body_iterator = then_done(response.body_iterator)
        return response


async def then_done(events: Any) -> AsyncIterator[str]:
    """The event by which clients of OpenAI's API know the end from a broken connection."""
    async with aclosing(events):
        async for event in events:
            yield event
    yield "data: [DONE]\n\n"


class Completions(Strict, CompletionHandler):
    request = CompletionRequest


class Chat(Strict, ChatCompletionHandler):
    request = ChatRequest

    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)
        if self.model_manager.tokenizer.chat_template is None:
            raise HTTPException(400, "this model has no chat template; use /v1/completions")


def build_app(name: str, model: Any, tokenizer: Any, voice: Voice) -> FastAPI:
    """The application that answers for `model` under `name`."""
    one, state = OneModel(name, model, tokenizer), OneVoice(voice)
    app: FastAPI = build_server(
        one,
        Chat(one, state),
        completion_handler=Completions(one, state),
        response_handler=None,
        transcription_handler=None,
        systemone_handler=None,
        generation_state=state,
    )
    app.router.routes[:] = [r for r in app.router.routes if getattr(r, "path", None) in ROUTES]
    for kind in (AnyHTTPException, RequestValidationError, TemplateError, Exception):
        app.add_exception_handler(kind, refuse)
    return app


def refuse(_request: Any, error: Exception) -> JSONResponse:
    """An error as OpenAI's clients read it."""
    code, message = 500, str(error)
    if isinstance(error, AnyHTTPException):
        code, message = error.status_code, str(error.detail)
    elif isinstance(error, RequestValidationError):
        code, message = 400, "the body is not a JSON object"
    elif isinstance(error, TemplateError):
        code, message = 400, f"the chat template refuses these messages: {error}"
    kind = "invalid_request_error" if code < 500 else "server_error"
    about = {"message": message, "type": kind, "param": None, "code": None}
    return JSONResponse({"error": about}, status_code=code)
