"""The HTTP endpoint that agents call: one key per session, on this machine only."""

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import math
import re
import secrets
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from nemo_rl_core.agents.anthropic_messages import AnthropicMessages
from nemo_rl_core.agents.calls import RefusedError, ended
from nemo_rl_core.agents.chat_completions import ChatCompletions
from nemo_rl_core.agents.fields import AgentCall
from nemo_rl_core.agents.responses import Responses
from nemo_rl_core.agents.session import Session

logger = logging.getLogger(__name__)

Dialect = ChatCompletions | AnthropicMessages
DIALECTS: Mapping[str, Dialect] = {
    "/chat/completions": ChatCompletions(),
    "/responses": Responses(),
    "/messages": AnthropicMessages(),
}
"""Dialects of the endpoint by path."""

MAX_BODY_BYTES = 8 * 1024**2
MAX_HEADER_BYTES = 32 * 1024
MAX_CONCURRENT_CALLS = 256
"""Maximum number of concurrent calls of a session."""
_MAX_CONNECTIONS = 4096
_READ_SECONDS = 10.0
"""Maximum time to send the headers of a request, and to wait between requests."""
_BODY_SECONDS = 60.0
_STOP_SECONDS = 2.0
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_MODEL = {
    "id": "policy",
    "object": "model",
    "created": 0,
    "owned_by": "nemo-rl",
    "type": "model",
    "display_name": "policy",
    "created_at": "1970-01-01T00:00:00Z",
}
"""The model, with the fields of OpenAI and Anthropic; calls may name any other."""


class AgentServer:
    """Server for the calls of all sessions, on the event loop that starts it.

    It speaks OpenAI's Chat Completions and Responses and Anthropic's Messages. A key is the number
    of its session with a message authentication code, so that a key of an ended session is known
    without being kept.

    Example:
        >>> server = AgentServer()                                  # doctest: +SKIP
        >>> base_url = await server.start()
        >>> client = AsyncOpenAI(base_url=base_url, api_key=server.open(session))
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._sessions: dict[int, Session] = {}
        self._num_opened = 0
        self._num_calls: Counter[int] = Counter()
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Starts to listen, and returns the base URL for clients of all dialects."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        config = uvicorn.Config(
            self._answer,
            interface="asgi3",
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=_MAX_CONNECTIONS,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve([listener]))
        while not self._server.started:
            await asyncio.sleep(0.001)
            if self._task.done():
                self._task.result()
        return f"http://127.0.0.1:{listener.getsockname()[1]}/v1"

    async def stop(self) -> None:
        """Ends all sessions and stops to listen."""
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            with contextlib.suppress(asyncio.CancelledError, TimeoutError):
                await asyncio.wait_for(self._task, _STOP_SECONDS)

    def open(self, session: Session) -> str:
        """Admits the calls of a session, and returns its key."""
        number = self._num_opened
        self._num_opened += 1
        self._sessions[number] = session
        return f"nemo-rl.{number}.{self._code(number)}"

    def end(self, key: str) -> None:
        """Ends a session; later calls with its key are refused."""
        session = self._sessions.pop(self._number(key), None)
        if session is not None:
            session.close()

    def _code(self, number: int) -> str:
        return hmac.new(self._secret, str(number).encode(), hashlib.sha256).hexdigest()

    def _number(self, key: str) -> int:
        """Returns the number of the session with this key."""
        match = re.fullmatch(r"nemo-rl\.(\d{1,18})\.([0-9a-f]{64})", key, re.ASCII)
        number = int(match[1]) if match else 0
        if not hmac.compare_digest(self._code(number), match[2] if match else ""):
            raise RefusedError(
                "the key is not that of an episode: use the api_key that the agent got",
                status=401,
                code="invalid_api_key",
            )
        return number

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        # The clients of OpenAI and Anthropic append different paths to a base URL.
        path = re.sub(r"^(/v1)+(?=/)", "", scope["path"])
        dialect = DIALECTS.get(path.removesuffix("/count_tokens"), DIALECTS["/chat/completions"])
        response: Response | None
        try:
            response = await self._response(scope, receive, path, dialect)
        except RefusedError as error:
            response = JSONResponse(dialect.error(error), error.status)
            if error.status in (401, 408, 413):  # the rest of the body is not read
                response.headers["connection"] = "close"
        # Broad on purpose: one agent's call must not stop those of others.
        except Exception:
            logger.exception("a call of an agent failed")
            failure = RefusedError(
                "the endpoint failed; see the run's log", status=500, code="failed"
            )
            response = JSONResponse(dialect.error(failure), failure.status)
        if response is not None:
            await response(scope, receive, send)

    async def _response(
        self, scope: Scope, receive: Receive, path: str, dialect: Dialect
    ) -> Response | None:
        """Returns the response; None if the client has left."""
        headers = Headers(scope=scope)
        scheme, _, token = headers.get("authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        number = self._number(key)
        if scope["method"] == "GET" and path == "/models":
            return JSONResponse({"object": "list", "data": [_MODEL], "has_more": False})
        if scope["method"] == "GET" and path.startswith("/models/"):
            return JSONResponse({**_MODEL, "id": path.removeprefix("/models/")})
        is_count = path == "/messages/count_tokens"
        if scope["method"] != "POST" or not (path in DIALECTS or is_count):
            paths = ", ".join(f"/v1{each}" for each in DIALECTS)
            raise RefusedError(
                f"nothing is at this path: POST to {paths}", status=404, code="no_path"
            )
        session = self._sessions.get(number)
        if session is None:
            raise ended()
        if self._num_calls[number] >= MAX_CONCURRENT_CALLS:
            limit = f"at most {MAX_CONCURRENT_CALLS} calls of an episode are answered at a time"
            raise RefusedError(limit, status=429, code="rate_limit_exceeded")
        self._num_calls[number] += 1
        try:
            body = _parsed(await _body(headers, receive))
            call = _read(dialect, body, headers)
            if is_count:
                return JSONResponse({"input_tokens": await session.count(call.turns, call.tools)})
            return await self._chat(session, call, body, dialect, receive)
        finally:
            self._num_calls[number] -= 1
            if not self._num_calls[number]:
                del self._num_calls[number]

    async def _chat(
        self,
        session: Session,
        call: AgentCall,
        body: dict[str, Any],
        dialect: Dialect,
        receive: Receive,
    ) -> Response | None:
        chat = session.chat(call.turns, tools=call.tools, options=call.options)
        sampling = asyncio.ensure_future(chat)
        leaving = asyncio.ensure_future(receive())  # the body was read: only a disconnect follows
        await asyncio.wait({sampling, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not sampling.done():
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
            return None
        leaving.cancel()
        answer = dialect.answer(body, sampling.result(), session.tokenizer)
        if not body.get("stream"):
            return JSONResponse(answer)
        text = "".join(_event_text(*event) for event in dialect.events(body, answer))
        return Response(text, media_type="text/event-stream")


class _Server(uvicorn.Server):
    """A server that leaves signals to the program."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(H11Protocol):
    """A connection that is closed if the headers of a request take too long."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._restart_idle()

    def on_response_complete(self) -> None:
        self._restart_idle()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._idle is not None:
            self._idle.cancel()

    def _restart_idle(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._idle = self.loop.call_later(_READ_SECONDS, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()


async def _body(headers: Headers, receive: Receive) -> bytes:
    parts: list[bytes] = []
    num_bytes = int(headers.get("content-length", "0"))
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            while num_bytes <= MAX_BODY_BYTES:
                message = await receive()
                parts.append(message.get("body", b""))
                num_bytes = sum(map(len, parts))
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError:
        limit = f"the body did not arrive within {_BODY_SECONDS:g} seconds"
        raise RefusedError(limit, status=408, code="timeout") from None
    limit = f"the body has more than {MAX_BODY_BYTES} bytes"
    raise RefusedError(limit, status=413, code="too_large")


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        text = body.decode("utf-8-sig")
        value = json.loads(text, parse_constant=_refuse_number, parse_float=_finite)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RefusedError(
            "the body has half of a surrogate pair, which is not text", code="invalid_json"
        ) from error
    except (ValueError, RecursionError) as error:
        raise RefusedError(
            f"the body is not JSON: {str(error)[:200]}", code="invalid_json"
        ) from error
    if not isinstance(value, dict):
        raise RefusedError("the body is not a JSON object", code="invalid_json")
    return value


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_number(text)


def _refuse_number(text: str) -> float:
    raise ValueError(f"{text[:40]} is not a finite number")


def _read(dialect: Dialect, body: dict[str, Any], headers: Headers) -> AgentCall:
    try:
        call = dialect.read(body)
    except RecursionError as error:
        raise RefusedError("the body is nested too deeply", code="invalid_json") from error
    retries = headers.get("x-stainless-retry-count", "0")
    return call.named(headers.get("idempotency-key"), is_retry=retries not in ("", "0"))


def _event_text(name: str | None, data: dict[str, Any] | str) -> str:
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"data: {text}\n\n" if name is None else f"event: {name}\ndata: {text}\n\n"
