"""The HTTP server of the page; unlike uvicorn's, it limits size and duration of requests."""

import asyncio
import contextlib
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from nemo_rl_core.ui.guard import HEADERS

MAX_HEADER_BYTES = 32 * 1024
"""Maximum size of the request line and headers together."""
MAX_CONNECTIONS = 256
"""Maximum number of open connections; others are answered with 503."""
EVENTS = "/events"
"""Path of the stream of events."""
IDLE_SECONDS = 10.0
"""Maximum time to send a request, and between two requests."""
READ_SECONDS = 60.0
"""Maximum time for which a client may leave a response unread."""


def create_server(app: Starlette) -> uvicorn.Server:
    """Returns a server for the application; call `run` with its sockets."""
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        log_level="warning",
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )
    return uvicorn.Server(config)


class BoundedProtocol(H11Protocol):
    """A connection that is closed if its client is slow; its error responses have `HEADERS`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._idle: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the timer for the first request."""
        super().connection_made(transport)
        self._restart_idle()
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(503, "Too many connections are open.\n")

    def on_response_complete(self) -> None:
        """Starts the timer for the next request."""
        self._restart_idle()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Starts the timer for reading by the client."""
        super().pause_writing()
        self._unread = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Stops the timer for reading by the client."""
        super().resume_writing()
        _cancel(self._unread)

    def shutdown(self) -> None:
        """Closes an idle connection and a stream of events, which never ends by itself."""
        super().shutdown()
        if self.cycle and not self.cycle.response_complete and self.scope["path"] == EVENTS:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops all timers."""
        super().connection_lost(exc)
        _cancel(self._idle)
        _cancel(self._unread)

    def send_400_response(self, msg: str) -> None:
        """Refuses requests that are not HTTP or have too many headers."""
        self._refuse(400, f"{msg}\n")

    def _refuse(self, status: int, text: str) -> None:
        headers = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
        headers += [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
        with contextlib.suppress(h11.LocalProtocolError):  # a response is in progress
            for event in (
                h11.Response(status_code=status, headers=headers),
                h11.Data(data=text.encode()),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _restart_idle(self) -> None:
        _cancel(self._idle)
        self._idle = self.loop.call_later(IDLE_SECONDS, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
