"""Server-sent events: an open page learns that the record has changed, instead of polling."""

import asyncio
import time
from collections.abc import AsyncIterator

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from nemo_rl_core.errors import NemoRLError
from nemo_rl_core.ui.pages.parameters import history_of

MAX_STREAMS = 32
"""Maximum number of open streams; others are answered with 503, and their pages poll."""
STREAM_SECONDS = 600.0
"""Duration of a stream, after which a browser opens the next one."""
_CHECK_SECONDS = 0.5
_COMMENT_SECONDS = 15.0


async def events(request: Request) -> Response:
    """Streams an event `changed` whenever another process has written to the record."""
    if request.method == "HEAD":
        return Response(media_type="text/event-stream")
    state = request.app.state
    if state.num_streams >= MAX_STREAMS:
        return PlainTextResponse("Too many live pages are open.\n", 503)
    return StreamingResponse(_changes(request), media_type="text/event-stream")


async def _changes(request: Request) -> AsyncIterator[str]:
    state = request.app.state
    state.num_streams += 1
    try:
        began = sent = time.monotonic()
        version = await run_in_threadpool(_version, request)
        yield "retry: 3000\n\n"
        while time.monotonic() - began < STREAM_SECONDS:
            await asyncio.sleep(_CHECK_SECONDS)
            current = await run_in_threadpool(_version, request)
            if current != version:
                version, sent = current, time.monotonic()
                yield "event: changed\ndata:\n\n"
            elif time.monotonic() - sent > _COMMENT_SECONDS:
                sent = time.monotonic()
                yield ": no change\n\n"  # a client that is gone is noticed by a write
    finally:
        state.num_streams -= 1


def _version(request: Request) -> tuple[int, int]:
    """Returns a value that changes with the record, also if its file is replaced or vanishes."""
    try:
        if request.app.state.source.is_empty():
            return 0, 0
        history = history_of(request)
        return id(history), history.version()
    except NemoRLError:
        return 0, 1
