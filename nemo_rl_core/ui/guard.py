"""Middleware that checks every request and restricts what a browser may do with the response.

By default the page has no login, because it listens only on this machine. Two things could still
reach it from outside: another site in the same browser, and a name that is rebound to 127.0.0.1.
The first cannot embed or read a page; the second is refused by its Host header.
"""

import hmac
import ipaddress
import logging
from collections.abc import Collection
from urllib.parse import quote, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; frame-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
DECK_POLICY = (
    "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'self'"
)
"""Policy for decks, which are HTML of stages: no scripts, network, forms or same origin."""

HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}

COOKIE = "nemo_rl_token"


class Guard:
    """ASGI middleware: only GET and HEAD, only known hosts, strict headers on every response.

    Args:
        token: Secret that every request must have; none is needed if it is empty.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] = (), token: str = "") -> None:
        self._app, self._token = app, token
        self._hosts = frozenset({"localhost", *(host.lower() for host in hosts)})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses a request, or passes it to the application."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no websockets: the server closes the connection

        has_started = False

        async def send_guarded(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            await (self._refusal(scope) or self._app)(scope, receive, send_guarded)
        # Broad on purpose: the server's own response to an error lacks the headers.
        except Exception:
            if has_started:
                raise
            logger.exception("the page %s failed", scope["path"])
            answer = PlainTextResponse("This page failed; see the terminal for the reason.\n", 500)
            await answer(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        host = Headers(scope=scope).get("host", "")
        if not self._is_allowed(host):
            return PlainTextResponse(
                f"Host {host!a} is not served here.\nOpen the address that `nemo-rl ui` printed, "
                "or name this host: nemo-rl ui --allow-host NAME\n",
                status_code=421,
            )
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse(
                "This page is read-only: use GET or HEAD.\n",
                status_code=405,
                headers={"allow": "GET, HEAD"},
            )
        return self._login(Request(scope)) if self._token else None

    def _login(self, request: Request) -> Response | None:
        """Keeps a token of the address in a cookie; refuses requests without a valid one."""
        if self._is_token(request.query_params.get("token", "")):
            rest = [pair for pair in request.query_params.multi_items() if pair[0] != "token"]
            path = "/" + quote(request.scope["path"].lstrip("/"))  # two slashes: another host
            answer = RedirectResponse(f"{path}?{urlencode(rest)}" if rest else path, 303)
            is_secure = request.url.scheme == "https"
            answer.set_cookie(COOKIE, self._token, secure=is_secure, httponly=True, samesite="lax")
            return answer
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        is_bearer = scheme.lower() == "bearer" and self._is_token(sent)
        if is_bearer or self._is_token(request.cookies.get(COOKIE, "")):
            return None
        text = "A token is needed: add ?token=TOKEN to the address, or send it as a bearer token.\n"
        return PlainTextResponse(text, 401, headers={"www-authenticate": "Bearer"})

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self._token.encode())

    def _is_allowed(self, header: str) -> bool:
        host = header.lower()
        host = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if host in self._hosts:
            return True
        try:
            ipaddress.ip_address(host)  # a name can be rebound to this machine, an address cannot
        except ValueError:
            return False
        return True
