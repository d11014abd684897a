"""Training examples in jsonl: prompts with completions, and chats.

    {"prompt": "2 + 2 =", "completion": " 4"}
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}

An example becomes parts of text, of which only completions and the assistant's turns are trained. A
chat is rendered by the tokenizer's chat template, or by `DEFAULT_TEMPLATE` if it has none.
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from tokenformer.data.compression import read_errors
from tokenformer.data.corpus import shown
from tokenformer.data.documents import check_row_size
from tokenformer.data.sources import Source
from tokenformer.errors import DataError, one_line

PROMPT, COMPLETION, MESSAGES = "prompt", "completion", "messages"
ASSISTANT = "assistant"
DEFAULT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ message.role }}: {{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{% if messages %}{{ '\\n' }}{% endif %}assistant:{% endif %}"
)
"""`user: Hi`, a line break, `assistant: Hello` and the end-of-text token."""


class Part(NamedTuple):
    text: str
    trained: bool


class Example(NamedTuple):
    parts: list[Part]
    """A prompt first, then a completion; a chat alternates."""
    rendered: bool
    """Whether the text comes from a template, whose special tokens are tokens, not text."""


class ExampleRow(NamedTuple):
    place: str
    """File and line, for messages."""
    line: bytes
    row: dict[str, Any]
    split: str | None


class ChatTemplate:
    """The chat template of a tokenizer, rendered in Jinja's sandbox."""

    def __init__(self, template: str | None, special_tokens: dict[str, Any]) -> None:
        self.template = DEFAULT_TEMPLATE if template is None else template
        self.special_tokens = special_tokens

    def render(self, messages: list[dict[str, Any]], *, asks: bool) -> str:
        """Return the text of a chat; with `asks` it ends where the assistant begins to write."""
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered, _ = render_jinja_template(
            conversations=[messages],
            chat_template=self.template,
            add_generation_prompt=asks,
            **self.special_tokens,
        )
        return str(rendered[0])


def holds_examples(sources: list[Source], text_field: str) -> bool:
    """Whether the first row of the first jsonl file is an example, not a text."""
    first = next((source for source in sources if source.kind == "jsonl"), None)
    if first is None:
        return False
    with read_errors(first.name), first.open() as (stream, _):
        line = stream.readline(first.read_options.max_row_bytes + 1)
        while line and not line.strip():
            line = stream.readline(first.read_options.max_row_bytes + 1)
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return False
    if not isinstance(row, dict) or text_field in row:
        return False
    return bool({PROMPT, COMPLETION, MESSAGES} & row.keys())


def example_rows(sources: list[Source]) -> Iterator[ExampleRow]:
    """Yield the rows of all jsonl files in order."""
    for source in sources:
        if source.kind != "jsonl":
            raise DataError(f"{source.name} is not jsonl; keep examples in a folder of their own")
        limit = source.read_options.max_row_bytes
        number = 0
        with read_errors(source.name), source.open() as (stream, _):
            while line := stream.readline(limit + 1):
                number += 1
                place = f"{source.name}, line {number}"
                check_row_size(len(line), limit, place)
                if line.strip():
                    yield ExampleRow(place, line.strip(), parse(line, place), source.split)


def parse(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not JSON: {one_line(error)}") from None
    if not isinstance(row, dict):
        raise DataError(f"{place} holds {shown(row)}, not an object with {PROMPT} and {COMPLETION}")
    return row


def to_example(row: ExampleRow, template: ChatTemplate) -> Example:
    if MESSAGES in row.row:
        return chat_example(row.row[MESSAGES], template, row.place)
    for name in (PROMPT, COMPLETION):
        check_text(row.row, name, row.place)
    if not row.row[COMPLETION].strip():
        raise DataError(f"{row.place}: the completion is empty, so there is nothing to learn")
    parts = [Part(row.row[PROMPT], trained=False), Part(row.row[COMPLETION], trained=True)]
    return Example(parts, rendered=False)


def check_text(row: dict[str, Any], name: str, place: str) -> None:
    if name not in row:
        have = ", ".join(map(repr, list(row)[:20])) or "none"
        raise DataError(
            f"{place} has no field {name!r}; its fields are {have}; an example has {PROMPT!r} and "
            f"{COMPLETION!r}, or {MESSAGES!r}"
        )
    if not isinstance(row[name], str):
        raise DataError(f"{place}: the field {name!r} holds {type(row[name]).__name__}, not text")


def chat_example(messages: Any, template: ChatTemplate, place: str) -> Example:
    """Return the turns of the assistant as trained parts, everything between them as prompts."""
    check_messages(messages, place)
    parts: list[Part] = []
    done = ""
    try:
        for index, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            prompt = template.render(messages[:index], asks=True)
            turn = template.render(messages[: index + 1], asks=False)
            if not (prompt.startswith(done) and turn.startswith(prompt)):
                raise DataError(
                    f"{place}: the chat template of the tokenizer changes earlier turns, so the "
                    "assistant's words cannot be told from the rest; use a tokenizer whose "
                    "template only appends"
                )
            parts += [
                Part(prompt[len(done) :], trained=False),
                Part(turn[len(prompt) :], trained=True),
            ]
            done = turn
    except DataError:
        raise
    except Exception as error:  # templates can raise anything
        raise DataError(
            f"{place}: the chat template refuses these messages: {one_line(error)}"
        ) from None
    return Example(parts, rendered=True)


def check_messages(messages: Any, place: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{place}: {MESSAGES!r} holds {shown(messages)}, not a list of messages")
    for message in messages:
        if not isinstance(message, dict):
            raise DataError(f"{place}: a message is {shown(message)}, not an object")
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                raise DataError(
                    f"{place}: a message has the {name} {shown(message.get(name))}, not text"
                )
    turns = [message["content"] for message in messages if message["role"] == ASSISTANT]
    if not turns:
        raise DataError(f"{place} has no turn of the assistant, so there is nothing to learn")
    if not all(turn.strip() for turn in turns):
        raise DataError(f"{place}: a turn of the assistant is empty")
