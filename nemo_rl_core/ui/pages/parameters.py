"""Parameters of requests."""

import math
from datetime import UTC, datetime

from starlette.exceptions import HTTPException
from starlette.requests import Request

from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import NodeDetail
from nemo_rl_core.ui import completions


def history_of(request: Request) -> History:
    """Returns the history that the application serves."""
    history: History = request.app.state.source.history()
    return history


def node_of(request: Request) -> NodeDetail:
    """Returns the node in the path of the request."""
    number = request.path_params["node"]
    if number >= 2**63:
        raise HTTPException(404, f"The store has no record of the node {number}.")
    return history_of(request).node(number)


def parameter(request: Request, name: str) -> str:
    """Returns a parameter of the query; empty if missing."""
    return request.query_params.get(name, "").strip()


def offset(request: Request, name: str = "offset") -> int:
    """Returns the index of a list's first item; 0 if missing or invalid."""
    text = parameter(request, name)
    return min(int(text), 10**9) if text.isdecimal() and len(text) < 12 else 0


def scan_seconds(request: Request) -> float:
    """Returns how long a search through files may take."""
    is_long = parameter(request, "long") == "yes"
    return completions.LONG_SCAN_SECONDS if is_long else completions.SCAN_SECONDS


def number_parameter(request: Request, name: str) -> float | None:
    """Returns a number; None if missing. A `ValueError` if it is not finite."""
    text = parameter(request, name)
    if not text:
        return None
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def day(request: Request, name: str) -> float | None:
    """Returns the start of a day in UTC as Unix time; None if missing or invalid."""
    try:
        return datetime.fromisoformat(parameter(request, name)).replace(tzinfo=UTC).timestamp()
    except (ValueError, OverflowError):
        return None
