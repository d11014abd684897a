"""`tokenformer serve` as a process, with OpenAI's own client."""

import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import openai
import pytest

from tests.support.parrot import SENTENCE
from tests.support.serving import LIMIT, serving
from tokenformer.cli import main
from tokenformer.installation import install_hint


@pytest.fixture(scope="module")
def server(parrot):
    with serving(parrot) as server:
        yield server
        with socket.create_connection(urlsplit(server.url).netloc.split(":"), LIMIT) as half_sent:
            half_sent.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
            time.sleep(0.5)
            assert server.end(by=signal.SIGTERM) == 0
        assert not [line for line in server.log if "Traceback" in line]


@pytest.fixture(scope="module")
def other(neox):
    with serving(neox, "--context", "15000") as server:
        yield server
        stream = server.complete(prompt="a", max_tokens=14_000, stream=True)
        next(iter(stream))
        assert server.end(by=signal.SIGINT) == 0  # Ctrl-C amid an answer


def test_a_greedy_completion_is_what_generate_says(server, parrot, monkeypatch, capsys):
    found = server.complete(prompt="Say 日")
    main(["generate", str(parrot), "--prompt", "Say 日", "--greedy", "--max_new_tokens", "40"])
    assert capsys.readouterr().out == "Say 日" + found.choices[0].text + "\n"
    assert found.choices[0].text.startswith(SENTENCE[len("Say 日") :])
    assert found.choices[0].finish_reason == "length"
    assert found.model == str(parrot)
    usage = found.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (7, 40, 47)


@pytest.mark.parametrize("options", [{}, {"temperature": 1, "seed": 3}, {"stop": "naï"}], ids=str)
def test_streaming_gives_the_same_text_in_whole_characters(server, options):
    whole = server.complete(prompt="Say 日", **options)
    events = list(server.complete(prompt="Say 日", stream=True, **options))
    pieces = [event.choices[0].text for event in events]
    assert "".join(pieces) == whole.choices[0].text
    assert sum(piece != "" for piece in pieces) >= 4
    assert events[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert events[-1].usage == whole.usage


def test_a_stop_sequence_ends_the_answer_before_it(server):
    found = server.complete(prompt="Say 日", stop=["never", "— or"])
    assert (found.choices[0].text, found.choices[0].finish_reason) == ("本語, naïve ", "stop")
    assert server.complete(prompt="Say 日", stop="\n").choices[0].text == SENTENCE[5:-1]


def test_the_seed_decides_also_among_others(server):
    def sample(seed):
        return server.complete(prompt="?", temperature=2, seed=seed).choices[0].text

    alone = [sample(seed) for seed in range(4)]
    assert len(set(alone)) == 4
    with ThreadPoolExecutor(8) as clients:
        assert list(clients.map(sample, [0, 1, 2, 3] * 2)) == alone * 2
    assert sample(None) != sample(None)


@pytest.mark.parametrize(
    ("options", "kind", "named"),
    [
        ({"model": "gpt2"}, openai.NotFoundError, "no model gpt2; this server has"),
        ({"prompt": "x" * 128}, openai.BadRequestError, "128 tokens, the model's context 128"),
        ({"max_tokens": 128}, openai.BadRequestError, "max_tokens can be at most 125"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"stop": ["a", ""]}, openai.BadRequestError, "stop.1"),
        ({"prompt": ["a", "b"]}, openai.BadRequestError, "prompt"),
        ({"n": 2}, openai.BadRequestError, "n=2 is not supported"),
        ({"logprobs": 0}, openai.BadRequestError, "logprobs=0 is not supported"),
        ({"echo": True}, openai.BadRequestError, "echo=True is not supported"),
        ({"frequency_penalty": 1}, openai.BadRequestError, "frequency_penalty=1"),
        (
            {"extra_body": {"generation_config": "{}"}},
            openai.BadRequestError,
            "generation_config='{}' is not supported",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_cannot_be_done_is_refused_by_name(server, options, kind, named, stream):
    with pytest.raises(kind) as refused:
        server.complete(**{"prompt": "abc", "stream": stream, **options})
    assert named in refused.value.body["message"]


def test_values_that_ask_for_nothing_pass(server):
    nothing = {"n": 1, "best_of": 1, "echo": False, "suffix": "", "logit_bias": {}, "user": "me"}
    nothing |= {"presence_penalty": 0.0, "frequency_penalty": 0, "logprobs": None}
    said = server.complete(prompt=["Say 日"], **nothing).choices[0].text
    assert said == server.complete(prompt="Say 日").choices[0].text
    short = server.complete(prompt="", max_tokens=openai.NOT_GIVEN)
    assert (short.usage.prompt_tokens, short.usage.completion_tokens) == (1, 16)


def test_only_what_concerns_the_one_model_is_there(server, parrot):
    assert [model.id for model in server.client.models.list()] == [str(parrot)]
    root = server.url.removesuffix("/v1")
    assert urlopen(f"{root}/health", timeout=LIMIT).status == 200
    for path in ("load_model", "reset", "v1/responses", "v1/systemone", "docs"):
        with pytest.raises(OSError, match="404"):
            urlopen(Request(f"{root}/{path}", data=b'{"model": "gpt2"}'), timeout=LIMIT)
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        server.chat(("user", "hello"))


def test_a_stream_ends_as_the_interface_says(server, parrot):
    body = b'{"prompt": "a", "stream": true, "max_tokens": 2}'
    ask = Request(f"{server.url}/completions", body, {"Content-Type": "application/json"})
    assert urlopen(ask, timeout=LIMIT).read().endswith(b"\n\ndata: [DONE]\n\n")


def test_a_chat_is_the_template_filled_in_and_completed(other):
    said = other.chat(("user", "Hi"), max_tokens=9)
    prompt = "[user] Hi\n[assistant] "
    completed = other.complete(prompt=prompt, max_tokens=9)
    assert said.choices[0].message.content == completed.choices[0].text
    assert said.usage == completed.usage
    events = list(other.chat(("user", "Hi"), max_completion_tokens=9, stream=True))
    streamed = "".join(event.choices[0].delta.content or "" for event in events)
    assert streamed == completed.choices[0].text
    with pytest.raises(openai.BadRequestError, match="no system messages"):
        other.chat(("system", "Hi"))
    with pytest.raises(openai.BadRequestError, match="tools"):
        other.chat(("user", "Hi"), tools=[])


def test_a_request_that_fails_fails_alone(other):
    """The model has no embedding for bytes from 128 on."""
    with pytest.raises(openai.InternalServerError, match="index out of range"):
        other.complete(prompt="é")
    with pytest.raises(openai.APIError):
        list(other.complete(prompt="é", stream=True))
    assert other.complete(prompt="e").usage.completion_tokens == 40


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_who_leaves_does_not_keep_the_others_waiting(other, stream):
    began = time.monotonic()
    other.complete(prompt="a", max_tokens=200)
    of_200 = time.monotonic() - began
    if stream:
        leaving = other.complete(prompt="a", max_tokens=14_000, stream=True)
        next(iter(leaving))
        leaving.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            other.complete(prompt="a", max_tokens=14_000, timeout=1)
    began = time.monotonic()
    other.complete(prompt="a", max_tokens=1)
    assert time.monotonic() - began < 35 * of_200  # all of it would take 70 times as long


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--port", "TAKEN"], "Address already in use"),
        (["--port", "99999"], "--port 99999"),
        (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
        (["--context", "1"], "--context 1"),
        (["--max_body", "0"], "--max_body 0"),
        (["--max_queue", "-1"], "--max_queue -1"),
        (["--request_timeout", "0"], "--request_timeout 0"),
        (["--template_timeout", "nan"], "--template_timeout nan"),
        (["--api_key", ""], "the API key must be"),
        (["--api_key", "two words"], "the API key must be"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(options, named, parrot, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        options = [port if word == "TAKEN" else word for word in options]
        with pytest.raises(SystemExit) as end:
            main(["serve", str(parrot), *options])
    captured = capsys.readouterr()
    assert end.value.code == 2
    assert captured.err.count("\n") == 1
    assert named in captured.err


@pytest.mark.parametrize("package", ["uvicorn", "fastapi", "openai"])
def test_without_the_extra_one_line_says_what_to_install(parrot, package):
    code = (
        f"import sys\nsys.modules['{package}'] = None  # as if it were not installed\n"
        f"from tokenformer.cli import main\nmain(['serve', {str(parrot)!r}, '--port', '0'])"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert install_hint("serve") in done.stderr
