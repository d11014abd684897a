"""Request schemas of `tokenformer serve`: the supported fields of OpenAI's API.

Other fields are refused, since silently ignoring them would return something the client did not
ask for. Fields that clients send by default, at values without effect, are dropped.
"""

from reprlib import repr as shortened
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

DEFAULT_MAX_TOKENS = 16
"""The default of OpenAI's completions API."""

MIN_TEMPERATURE = 1e-10
"""Below it, logits divided by the temperature overflow float32."""

MAX_STOP = 1000
"""Maximum characters in a stop sequence."""

MAX_ERRORS = 5
"""Maximum number of errors listed for one request."""


def check_unicode(text: str) -> str:
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("a lone surrogate is not a Unicode character")
    return text


def check_temperature(temperature: float) -> float:
    if 0 < temperature < MIN_TEMPERATURE:
        raise ValueError(f"must be 0 or at least {MIN_TEMPERATURE:g}")
    return temperature


Text = Annotated[str, AfterValidator(check_unicode)]


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    no_effect: ClassVar[dict[str, Any]] = {
        "n": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "logit_bias": {},
    }

    model: Text | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: Annotated[float, AfterValidator(check_temperature)] | None = Field(
        None, ge=0, le=2
    )
    top_p: float | None = Field(None, gt=0, le=1)
    stop: list[Annotated[Text, Field(min_length=1, max_length=MAX_STOP)]] = Field([], max_length=4)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stream: bool = False
    stream_options: dict[str, Any] | None = None  # the usage is always included
    user: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def drop_fields_without_effect(cls, body: dict[str, Any]) -> dict[str, Any]:
        given = {name: value for name, value in body.items() if value is not None}
        for name, default in cls.no_effect.items():
            if given.get(name) == default:
                del given[name]
        if isinstance(given.get("stop"), str):
            given["stop"] = [given["stop"]]
        return given


class CompletionRequest(Request):
    """The body of `/v1/completions`."""

    no_effect = Request.no_effect | {"best_of": 1, "echo": False, "suffix": ""}

    prompt: Text
    max_tokens: int = Field(DEFAULT_MAX_TOKENS, ge=1)

    @model_validator(mode="before")
    @classmethod
    def unwrap_single_prompt(cls, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            return {**body, "prompt": prompt[0]}
        return body


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: Text


class ImageURL(BaseModel):
    model_config = ConfigDict(extra="forbid")

    url: Text
    detail: Literal["auto"] = "auto"  # every image takes as many positions


class ImagePart(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["image_url"]
    image_url: ImageURL


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]
Content = Annotated[
    Annotated[Text, Tag("text")] | Annotated[list[Part], Tag("parts")],
    Discriminator(lambda given: "parts" if isinstance(given, list) else "text"),
]


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: Text
    content: Content


class ChatRequest(Request):
    """The body of `/v1/chat/completions`."""

    no_effect = Request.no_effect | {"logprobs": False}

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def merge_token_limits(self) -> "ChatRequest":
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        return self


class AdapterRequest(BaseModel):
    """The body of `POST /v1/adapters`."""

    model_config = ConfigDict(extra="forbid")

    name: Text
    folder: Text


def explain(error: ValidationError) -> str:
    """Return the errors of a request in one line."""
    wrong = []
    found = error.errors(include_url=False, include_context=False)
    for each in found[:MAX_ERRORS]:
        name = shorten(".".join(map(str, each["loc"])))
        if each["type"] == "extra_forbidden":
            wrong.append(f"{name}={shortened(each['input'])} is not supported")
        else:
            reason = each["msg"].removeprefix("Value error, ")
            wrong.append(f"{name}: {reason[:1].lower()}{reason[1:]}")
    if len(found) > MAX_ERRORS:
        wrong.append(f"{len(found) - MAX_ERRORS} more errors")
    return "; ".join(wrong)


def shorten(name: str) -> str:
    return name if len(name) <= 100 else f"{name[:97]}..."
