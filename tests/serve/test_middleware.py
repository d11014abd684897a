"""Requests that are refused, cancelled or left by their client, on the middleware itself."""

import asyncio
import json
import logging
from contextlib import nullcontext

import pytest
import uvicorn

from tokenformer.serve.limits import Limits
from tokenformer.serve.middleware import LimitRequests

LIMIT = 90


@pytest.fixture
def log(caplog):
    """What uvicorn logs; a server of an earlier test may have turned propagation off."""
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


async def served(app, talk):
    """`talk(host, port, server)` with uvicorn in this event loop."""
    config = uvicorn.Config(
        app, port=0, lifespan="off", log_config=None, timeout_graceful_shutdown=1, ws="none"
    )
    server = uvicorn.Server(config)
    server.capture_signals = nullcontext  # leave the signals to pytest
    running = asyncio.ensure_future(server.serve())
    for _ in range(100 * LIMIT):
        if server.started or running.done():
            break
        await asyncio.sleep(0.01)
    assert server.started
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        return await asyncio.wait_for(talk(port, server), LIMIT)
    finally:
        server.should_exit = True
        await asyncio.wait_for(running, LIMIT)


def request(headers: str, body: str = "") -> bytes:
    return f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n{body}".encode()


async def never(scope, receive, send):
    await asyncio.sleep(10 * LIMIT)


def test_a_client_that_leaves_while_it_is_refused_leaves_no_traceback(log):
    refused = asyncio.Event()

    class Watched(LimitRequests):
        async def discard(self, headers, body, error):
            try:
                await super().discard(headers, body, error)
            finally:
                refused.set()

    async def leave(port, server):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("Content-Length: 1000\r\n", "half"))
        await writer.drain()
        await asyncio.sleep(0.2)
        writer.close()
        await refused.wait()

    asyncio.run(served(Watched(never, Limits(max_body=10)), leave))
    assert "Traceback" not in log.text
    assert "Exception in ASGI" not in log.text


def test_a_request_that_shutting_down_cancels_is_answered_with_503(log):
    async def shut_down(port, server):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("Content-Length: 2\r\n", "{}"))
        await writer.drain()
        await asyncio.sleep(0.2)
        server.should_exit = True
        answer = await reader.read()
        writer.close()
        return answer

    answer = asyncio.run(served(LimitRequests(never, Limits()), shut_down))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert json.loads(body)["error"]["message"] == "the server is shutting down"
    assert "Traceback" not in log.text
