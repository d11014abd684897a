"""A request, whatever it holds, is answered or refused with a 4xx: never with a 500."""

import json
import math

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}


def post(client, path, body):
    """With `json.dumps`, which writes lone surrogates, NaN and integers of any size."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.post(path, content=content, headers=JSON)


def refused(response, code=400):
    assert response.status_code == code, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error["message"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": "a\ud800"}, "prompt: a lone surrogate"),
        ({"stop": ["\udfff"]}, "stop.0: a lone surrogate"),
        ({"model": "\ud800"}, "model: a lone surrogate"),
        ({"user": "\ud800"}, "user: a lone surrogate"),
        ({"\ud800": 1}, "unable to parse raw data as a unicode string"),
        ({"temperature": 1e-320}, "temperature: must be 0 or at least 1e-10"),
        ({"temperature": 1e-38}, "temperature: must be 0 or at least 1e-10"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 10**400}, "max_tokens can be at most"),
        ({"seed": 2**63}, "seed"),
        ({"stop": "x" * 1001}, "stop.0"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"prompt": "x" * 10**6}, "the prompt has at least"),
        ({"x" * 10**5: 1}, "..."),
        ({str(i): 1 for i in range(1000)}, "995 more errors"),
    ],
    ids=lambda value: repr(value)[:30] if isinstance(value, dict) else "",
)
def test_values_that_cannot_be_honoured_are_named(client, fields, named):
    message = refused(post(client, COMPLETIONS, {"prompt": "a", "max_tokens": 2, **fields}))
    assert named in message
    assert len(message) < 1000


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user", "content": "\ud800"}],
        [{"role": "\ud800", "content": "a"}],
        [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "a"}]}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": "sum"}],
        "hello",
        {},
    ],
    ids=repr,
)
def test_messages_that_cannot_be_rendered_are_refused(client, messages):
    refused(post(client, CHAT, {"messages": messages}))


def test_a_language_model_takes_no_images(client):
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
    ]
    message = refused(post(client, CHAT, {"messages": [{"role": "user", "content": parts}]}))
    assert message == "messages.0.content.1 is an image, and this model takes text only"


def test_small_values_that_can_be_honoured_are(client):
    for options in ({"temperature": 1e-10}, {"top_p": 1e-320}, {"temperature": 2, "top_p": 5e-324}):
        response = post(client, COMPLETIONS, {"prompt": "a", "max_tokens": 2, **options})
        assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b'{"stream_options":' + b"[" * 900 + b"]" * 900 + b', "prompt": "a", "n": 2}',
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: repr(body)[:30],
)
def test_a_body_that_is_no_request_is_refused(client, body):
    for path in (COMPLETIONS, CHAT):
        refused(post(client, path, body))


@pytest.mark.parametrize("kind", [None, "text/plain", "multipart/form-data", "nonsense"])
def test_only_json_is_read(client, kind):
    """A web page can send other types to this machine without being asked for leave (CORS)."""
    headers = {} if kind is None else {"Content-Type": kind}
    response = client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers)
    assert "application/json" in refused(response)


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_subnormal=True)
    | st.text(st.characters(), max_size=20)
    | st.sampled_from(["\ud800", "\0", "", "<|endoftext|>", 10**300, -1, 0, 1e-320, 1e-40, 2**63]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
text = st.text(st.characters(), max_size=20)
options = st.fixed_dictionaries(
    {},
    optional={
        "model": st.just("tiny") | anything,
        "max_tokens": st.integers(1, 8) | anything,
        "temperature": st.floats(0, 2, allow_subnormal=True) | anything,
        "top_p": st.floats(0, 1, allow_subnormal=True) | anything,
        "stop": text | st.lists(text, max_size=5) | anything,
        "seed": st.integers(0, 2**63) | anything,
        "stream": st.booleans() | anything,
        "stream_options": anything,
        "user": text | anything,
        "n": st.just(1) | anything,
        "logit_bias": anything,
        "extra": anything,
    },
)
message = st.fixed_dictionaries({"role": text, "content": text}) | anything
bounded = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@bounded
@given(options=options, prompt=text | anything)
@example(options={"temperature": 1e-320}, prompt="a")
@example(options={"top_p": 5e-324, "temperature": 1e-10}, prompt="a")
def test_no_completion_request_is_a_server_error(client, options, prompt):
    check(post(client, COMPLETIONS, {"max_tokens": 3, **options, "prompt": prompt}))


@bounded
@given(options=options, messages=st.lists(message, min_size=1, max_size=3) | anything)
def test_no_chat_request_is_a_server_error(client, options, messages):
    check(post(client, CHAT, {"max_tokens": 3, **options, "messages": messages}))


def check(response):
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        refused(response, response.status_code)
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in response.text
