"""A timeout for request headers, which uvicorn lacks."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


class HeaderTimeout(H11Protocol):
    """Closes a connection whose request headers are not complete `header_timeout` seconds after it
    was opened, or after the first byte of a later request. The body is timed by `LimitRequests`.
    """

    header_timeout: float

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.start_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self.stop_timer()
        elif self.timer is None:
            self.start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_timer()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Finish responding to a complete request; do not wait for one that is half sent."""
        if self.cycle is not None and not self.cycle.response_complete and self.cycle.more_body:
            self.transport.close()
        else:
            super().shutdown()

    def start_timer(self) -> None:
        self.timer = self.loop.call_later(self.header_timeout, self.transport.close)

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


def with_header_timeout(seconds: float) -> type[HeaderTimeout]:
    """Return the protocol class for `uvicorn.Config(http=...)`."""
    return type("TimedProtocol", (HeaderTimeout,), {"header_timeout": seconds})
