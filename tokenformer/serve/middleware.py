"""Checks on every request before a handler sees it, and error responses.

`LimitRequests` is ASGI middleware. It checks the Host header and the API key, reads the body within
the limits on size and time, and cancels the handler when the client disconnects.
"""

import asyncio
import hmac
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import anyio
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenformer.serve.limits import Limits

OPEN_PATH = "/health"
"""Answered without an API key and for any Host, for load balancers."""

DISCARD_BYTES = 2**26
"""How much of a refused body is read and dropped: closing a connection with unread data resets it,
and the client never sees the error."""

CODES = {401: "invalid_api_key"}


class LimitRequests:
    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self.app = app
        self.limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, body = Headers(scope=scope), Body(receive)
        try:
            self.check_host(scope["path"], headers)
            self.check_key(scope["path"], headers)
            whole = await self.read(headers, body)
        except HTTPException as error:
            with suppress(ClientDisconnect):
                await self.refuse(error, headers, body, scope, receive, send)
        except ClientDisconnect:
            return
        else:
            await self.run(whole, scope, receive, send)

    async def refuse(
        self,
        error: HTTPException,
        headers: Headers,
        body: "Body",
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        await self.discard(headers, body, error)
        response = error_response(error)
        response.headers["Connection"] = "close"
        await response(scope, receive, send)

    def check_host(self, path: str, headers: Headers) -> None:
        host = headers.get("host", "")
        if path != OPEN_PATH and not self.limits.hosts.accepts(host):
            raise HTTPException(
                403, f"the Host {host[:100]!r} is not allowed; start with --allowed_hosts to add it"
            )

    def check_key(self, path: str, headers: Headers) -> None:
        if self.limits.api_key is None or path == OPEN_PATH:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        expected = self.limits.api_key.encode("latin-1")
        same = hmac.compare_digest(given.strip().encode("latin-1"), expected)
        if scheme.lower() != "bearer" or not same:
            message = "missing or incorrect API key; send it as Authorization: Bearer KEY"
            raise HTTPException(401, message, {"WWW-Authenticate": "Bearer"})

    async def read(self, headers: Headers, body: "Body") -> bytes:
        limit, seconds = self.limits.max_body, self.limits.request_timeout
        too_large = HTTPException(413, f"the body is larger than --max_body {limit} bytes")
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise too_large
        whole = bytearray()
        try:
            with anyio.fail_after(seconds):
                async for chunk in body:
                    whole += chunk
                    if len(whole) > limit:
                        raise too_large
        except TimeoutError:
            message = f"the body did not arrive within --request_timeout {seconds:g} seconds"
            raise HTTPException(408, message) from None
        return bytes(whole)

    async def discard(self, headers: Headers, body: "Body", error: HTTPException) -> None:
        """Read the rest of a refused body, unless the client waits for 100 Continue."""
        if error.status_code == 408 or "expect" in headers:
            return
        dropped = 0
        with anyio.move_on_after(self.limits.request_timeout):
            async for chunk in body:
                dropped += len(chunk)
                if dropped > DISCARD_BYTES:
                    return

    async def run(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application on the body until it is done or the client disconnects. Requests
        without a response when the server shuts down get a 503."""
        unread, started, complete, disconnected = [body], False, False, asyncio.Event()

        async def replay() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await disconnected.wait()
            return {"type": "http.disconnect"}

        async def sending(message: Message) -> None:
            nonlocal started, complete
            started = True
            await send(message)
            complete = message["type"] == "http.response.body" and not message.get("more_body")

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            disconnected.set()
            if not complete:
                handling.cancel()

        handling = asyncio.ensure_future(_call(self.app, scope, replay, sending))
        watching = asyncio.ensure_future(watch())
        try:
            await handling
        except asyncio.CancelledError:
            if not disconnected.is_set() and not started:
                stopped = HTTPException(503, "the server is shutting down")
                await error_response(stopped)(scope, receive, send)
        finally:
            watching.cancel()


async def _call(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    await app(scope, receive, send)


class Body:
    """The chunks of a request body; a new iteration continues where the last one stopped."""

    def __init__(self, receive: Receive) -> None:
        self.receive = receive
        self.complete = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while not self.complete:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            self.complete = not message.get("more_body", False)
            yield message.get("body", b"")


def error_response(error: Exception) -> JSONResponse:
    """Return an error in the format of OpenAI's API."""
    code, message, headers = 500, str(error), None
    if isinstance(error, HTTPException):
        code, message, headers = error.status_code, str(error.detail), error.headers
    elif isinstance(error, RequestValidationError):
        code, message = 400, "the body must be a JSON object, sent as application/json"
    kind = "invalid_request_error" if code < 500 else "server_error"
    message = message.encode(errors="backslashreplace").decode()  # it may quote the request
    details = {"message": message, "type": kind, "param": None, "code": CODES.get(code)}
    return JSONResponse({"error": details}, status_code=code, headers=headers)


async def handle_error(_request: Any, error: Exception) -> JSONResponse:
    return error_response(error)
