"""Templates and responses rendered from them."""

import functools
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined, Undefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse

from nemo_rl_core.config.url_secrets import redacted
from nemo_rl_core.history.records import point_label
from nemo_rl_core.ui import text

STATIC = Path(__file__).parent / "static"
_LIVE_SECONDS = 2


def render(
    request: Request, template: str, *, status: int = 200, live: bool = False, **context: Any
) -> HTMLResponse:
    """Renders a page, which the browser keeps up to date if it is live."""
    page = (
        environment()
        .get_template(template)
        .render(
            {
                "section": "",
                "shared": False,
                "store": request.app.state.source.store.root,
                "now": time.time(),
                "live_seconds": _LIVE_SECONDS if live else 0,
                "link": functools.partial(link, request),
                **context,
            }
        )
    )
    return HTMLResponse(page, status_code=status)


def render_message(
    request: Request,
    heading: str,
    text: str,
    *,
    facts: Sequence[tuple[str, str]] = (),
    command: str = "",
    matches: Sequence[str] = (),
    **options: Any,
) -> HTMLResponse:
    """Renders a page with only a text, and facts, a command or artifacts that may help."""
    options |= {"heading": heading, "text": text, "facts": facts, "command": command}
    return render(request, "message.html", matches=matches, **options)


def link(request: Request, **changed: object) -> str:
    """Returns the query string of this page with some parameters changed."""
    parameters = [(key, value) for key, value in request.query_params.multi_items() if value]
    kept = [(key, value) for key, value in parameters if key not in changed]
    return "?" + urlencode([*kept, *((key, str(value)) for key, value in changed.items())])


@functools.cache
def environment() -> Environment:
    """Returns the Jinja environment; all values are escaped."""
    jinja = Environment(
        loader=PackageLoader("nemo_rl_core.ui"),
        autoescape=True,
        finalize=_finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters |= {
        "ago": text.ago,
        "cut": text.cut,
        "duration": text.duration,
        "iso": text.iso,
        "json_readable": _json_readable,
        "moment": text.moment,
        "number": text.number,
        "point": point_label,
        "plain_type": text.plain_type,
        "readable": text.readable,
        "size": text.size,
        "stage": text.short_stage,
        "urlencode": _quoted,
    }
    jinja.globals["static"] = static_address
    jinja.policies["json.dumps_kwargs"] = {"sort_keys": True, "default": str}
    return jinja


@functools.cache
def static_address(name: str) -> str:
    """Returns the URL of a static file with a digest of its content, for browser caches."""
    digest = hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:12]
    return f"/static/{name}?{digest}"


def _finalize(value: object) -> object:
    if isinstance(value, (Markup, Undefined)) or value is None:
        return value
    return text.visible(redacted(str(value)))  # records of earlier versions may contain secrets


def _quoted(value: object) -> str:
    # A file name may contain invalid bytes; this breaks only its link, not the page.
    return quote(str(value), safe="/", errors="replace")


def _json_readable(value: str) -> str:
    try:
        return text.readable(json.loads(value))
    except ValueError:
        return value
