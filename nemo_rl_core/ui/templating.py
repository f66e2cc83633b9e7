"""Templates, and how an answer is made of one."""

import functools
import hashlib
import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined, Undefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse

from nemo_rl_core.ui import text

STATIC = Path(__file__).parent / "static"
_LIVE_SECONDS = 2


def render(
    request: Request, template: str, *, status: int = 200, live: bool = False, **context: Any
) -> HTMLResponse:
    """A page.

    Args:
        request: What was asked.
        template: Its file name.
        status: Of HTTP.
        live: Whether the browser should ask again every other second, since something goes on.
        **context: What the template shows. A context names it `section` where it belongs to one.
    """
    page = (
        environment()
        .get_template(template)
        .render(
            {
                "section": "",
                "store": request.app.state.source.store.root,
                "now": time.time(),
                "live_seconds": _LIVE_SECONDS if live else 0,
                "link": functools.partial(link, request),
                **context,
            }
        )
    )
    return HTMLResponse(page, status_code=status)


def link(request: Request, **changed: object) -> str:
    """This page's address with other parameters."""
    given = [(key, value) for key, value in request.query_params.multi_items() if value]
    kept = [(key, value) for key, value in given if key not in changed]
    return "?" + urlencode([*kept, *((key, str(value)) for key, value in changed.items())])


@functools.cache
def environment() -> Environment:
    """The templates, which escape whatever they are given."""
    made = Environment(
        loader=PackageLoader("nemo_rl_core.ui"),
        autoescape=True,
        finalize=_finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "cut": text.cut,
        "duration": text.duration,
        "iso": text.iso,
        "json_readable": _json_readable,
        "moment": text.moment,
        "number": text.number,
        "readable": text.readable,
        "size": text.size,
        "stage": text.short_stage,
        "urlencode": _quoted,
    }
    made.globals["static"] = static_address
    made.policies["json.dumps_kwargs"] = {"sort_keys": True, "default": str}
    return made


@functools.cache
def static_address(name: str) -> str:
    """A file's address, which changes with its content: a browser may keep it for ever."""
    digest = hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:12]
    return f"/static/{name}?{digest}"


def _finalize(value: object) -> object:
    if isinstance(value, (Markup, Undefined)) or value is None:
        return value
    return text.visible(str(value))


def _quoted(value: object) -> str:
    # A file's name may hold bytes that are no text; what cannot be asked for is at least shown.
    return quote(str(value), safe="/", errors="replace")


def _json_readable(value: str) -> str:
    try:
        return text.readable(json.loads(value))
    except ValueError:
        return value
