"""`tokenformer serve` with clients that send too much, too slowly or without the key."""

import json
import select
import signal
import socket
import threading
import time
from contextlib import suppress
from http.client import HTTPConnection, HTTPResponse
from urllib.parse import urlsplit

import openai
import pytest

from tests.support.processes import wait_until
from tests.support.serving import LIMIT, serving

KEY = "sk-0123456789"
MAX_BODY = 20_000


@pytest.fixture(scope="module")
def looping(neox, tmp_path_factory):
    """The model of `neox`, whose chat template now loops when it is told to."""
    from shutil import copytree

    from transformers import AutoTokenizer

    folder = copytree(neox, tmp_path_factory.mktemp("looping") / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message.content == 'loop' %}"
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
        "{{ message.content }}{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(looping):
    limits = ["--max_body", str(MAX_BODY), "--request_timeout", "3", "--max_queue", "1"]
    others = [
        "--template_timeout",
        "3600",
        "--allowed_hosts",
        "models.example",
        "--context",
        "15000",
    ]
    with serving(looping, *limits, *others, key=KEY) as server:
        server.defaults["max_tokens"] = 2
        yield server


def ask(server, path="/v1/completions", body=b'{"prompt": "a", "max_tokens": 1}', **headers):
    """The status, headers and JSON of a response. A body that is not bytes is sent in chunks."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", **headers}
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=LIMIT)
    try:
        connection.request("POST" if body is not None else "GET", path, body, headers)
        response = connection.getresponse()
        return response.status, response.headers, json.loads(response.read())
    finally:
        connection.close()


def message(answer, code):
    status, _, body = answer
    assert status == code, body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]["message"]


def connect(server):
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=LIMIT)


def test_a_body_above_the_limit_is_refused(server):
    large = json.dumps({"prompt": "a" * 10 * MAX_BODY}).encode()
    pieces = (large[start : start + 10_000] for start in range(0, len(large), 10_000))
    for body in (large, pieces):  # the second is chunked, without a Content-Length
        assert f"--max_body {MAX_BODY}" in message(ask(server, body=body), 413)
    just = json.dumps({"prompt": "a", "user": "", "max_tokens": 1}).encode()
    just = just.replace(b'""', b'"' + b"u" * (MAX_BODY - len(just)) + b'"')
    assert len(just) == MAX_BODY
    assert ask(server, body=just)[0] == 200
    assert ask(server, body=iter([just[:99], just[99:]]))[0] == 200


def test_a_client_that_waits_for_leave_is_refused_before_it_sends(server):
    with connect(server) as client:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        )
        head += f"Expect: 100-continue\r\nContent-Length: {MAX_BODY + 1}\r\n\r\n"
        client.sendall(head.encode())
        assert client.recv(4096).startswith(b"HTTP/1.1 413 ")


BODY = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n"
BODY += f"Authorization: Bearer {KEY}\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "dribble", "answer"),
    [
        ("", b"", b""),
        ("POST /v1/comp", b"", b""),
        ("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Header: ", b"x", b""),
        ("GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /he", b"x", b"HTTP/1.1 200 "),
        (BODY, b"", b"HTTP/1.1 408 "),
        (BODY, b"x", b"HTTP/1.1 408 "),
        (BODY.replace(KEY, "wrong"), b"x", b"HTTP/1.1 401 "),
    ],
    ids=["nothing", "half a line", "headers", "second request", "body", "slow body", "refused"],
)
def test_a_request_that_does_not_arrive_is_given_up(server, sent, dribble, answer):
    received, end = b"", time.monotonic() + LIMIT
    with connect(server) as client:
        client.sendall(sent.encode())
        client.settimeout(0.5 if dribble else LIMIT)
        while time.monotonic() < end:
            try:
                data = client.recv(4096)
                if not data:
                    break
                received += data
            except TimeoutError:
                with suppress(ConnectionError):  # then it is closed, and the next `recv` ends
                    client.sendall(dribble)
            except ConnectionError:
                break
        else:
            pytest.fail("the connection is still open")
    assert received.startswith(answer)
    assert bool(received) == bool(answer)


def test_others_are_answered_while_requests_are_half_sent(server):
    clients = [connect(server) for _ in range(50)]
    try:
        for client in clients:
            client.sendall(BODY.encode())
        assert server.complete(prompt="a").usage.completion_tokens == 2
    finally:
        for client in clients:
            client.close()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:80", "[::1]:80", "Models.Example:8000"])
def test_the_names_of_this_machine_and_those_given_are_allowed(server, host):
    assert ask(server, "/health", None, Host=host)[0] == 200


@pytest.mark.parametrize("host", ["attacker.example", "localhost.attacker.example", "10.0.0.1", ""])
def test_another_host_is_refused(server, host):
    assert "--allowed_hosts" in message(ask(server, "/v1/models", None, Host=host), 403)


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer wrong", KEY, f"Basic {KEY}", "Bearer \xff"]
)
def test_without_the_key_only_health_is_answered(server, given):
    for path, body in (("/v1/models", None), ("/v1/completions", b"{}"), ("/no", None)):
        answer = ask(server, path, body, Authorization=given)
        assert "API key" in message(answer, 401)
        assert answer[2]["error"]["code"] == "invalid_api_key"
    assert ask(server, "/health", None, Authorization=given)[0] == 200


def test_the_key_is_in_no_log(server):
    with pytest.raises(openai.AuthenticationError):
        server.client.with_options(api_key="wrong").models.list()
    assert [model.id for model in server.client.models.list()]
    wait_until(lambda: any("/v1/models" in line for line in server.log))
    assert not any(KEY in line for line in server.log)


def send(server):
    """A connection that has sent a request, whose answer would take long."""
    body = b'{"prompt": "a", "max_tokens": 14000}'
    head = BODY.replace("999", f"{len(body)}\r\nContent-Type: application/json")
    client = connect(server)
    client.sendall(head.encode() + body)
    return client


def answered(clients, seconds):
    """The first of the clients to have an answer, if any has within the time."""
    return next(iter(select.select(clients, [], [], seconds)[0]), None)


def test_the_queue_has_an_end_and_forgets_who_leaves(server):
    running = server.complete(prompt="a", max_tokens=14_000, stream=True)
    next(iter(running))
    clients = [send(server), send(server)]  # one of them waits, and so the other is refused
    try:
        refused = HTTPResponse(answered(clients, LIMIT))
        refused.begin()
        answer = refused.status, refused.headers, json.loads(refused.read())
        assert "--max_queue" in message(answer, 503)
        assert int(refused.headers["Retry-After"]) > 0
        for client in clients:
            client.close()
        for _ in range(20):  # until it is seen that the one who waited has left
            clients.append(send(server))
            if answered(clients[-1:], 2) is None:
                break  # now this one waits
        else:
            pytest.fail("the queue is still full")
    finally:
        for client in clients:
            client.close()
        running.close()
    assert server.complete(prompt="a").usage.completion_tokens == 2


def test_a_template_that_loops_delays_neither_others_nor_the_end(server):
    failed = []

    def loop():
        try:
            server.chat(("user", "loop"))
        except openai.APIStatusError as error:
            failed.append(error)

    assert server.chat(("user", "Hi")).usage.completion_tokens == 2
    looping = threading.Thread(target=loop, daemon=True)
    looping.start()
    time.sleep(1)
    assert server.complete(prompt="a").usage.completion_tokens == 2
    assert ask(server, "/health", None)[0] == 200
    assert looping.is_alive()
    assert server.end(by=signal.SIGTERM) == 0
    looping.join(LIMIT)
    assert [error.status_code for error in failed] == [503]


STUCK = """
import time
import tokenformer.cli.serve
from tokenformer.cli import main
from tokenformer.serve.prompt_encoder import PromptEncoder
from tokenformer.serve.generation_queue import GenerationQueue
{stuck} = lambda *args: (print("stuck", flush=True), time.sleep(3600))
tokenformer.cli.serve.SECONDS_TO_END = 1
tokenformer.cli.serve.SECONDS_TO_EXIT = {seconds}
main()
"""


@pytest.mark.slow
def test_the_process_ends_even_when_a_prefill_does_not(neox):
    program = STUCK.format(stuck="GenerationQueue.wait", seconds=2)
    with serving(neox, program=("-c", program)) as server:
        assert server.end(by=signal.SIGTERM) == 1
        wait_until(lambda: any("exiting anyway" in line for line in server.log))


@pytest.mark.slow
def test_the_process_ends_even_when_a_prompt_is_still_tokenized(neox):
    """And the client that sent it is told so."""
    program = STUCK.format(stuck="PromptEncoder.tokenize", seconds=8)
    with serving(neox, program=("-c", program)) as server, connect(server) as client:
        body = b'{"prompt": "a"}'
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        wait_until(lambda: any("stuck" in line for line in server.log))
        assert server.end(by=signal.SIGTERM) == 1
        response = HTTPResponse(client)
        response.begin()
        assert response.status == 503
        assert "shutting down" in json.loads(response.read())["error"]["message"]
        wait_until(lambda: any("exiting anyway" in line for line in server.log))
        assert not any("Traceback" in line for line in server.log)
