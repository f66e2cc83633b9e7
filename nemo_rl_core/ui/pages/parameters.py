"""What the address of a page asks for."""

import math
from datetime import UTC, datetime

from starlette.exceptions import HTTPException
from starlette.requests import Request

from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import NodeDetail


def history_of(request: Request) -> History:
    """The history that the application serves.

    Raises:
        StoreError: If there is none, or it cannot be read.
    """
    found: History = request.app.state.source.history()
    return found


def node_of(request: Request) -> NodeDetail:
    """The node that the address names.

    Raises:
        HTTPException: If its number is larger than any that the database can give.
        StoreError: If there is none.
    """
    number = request.path_params["node"]
    if number >= 2**63:
        raise HTTPException(404, f"The store has no record of the node {number}.")
    return history_of(request).node(number)


def word(request: Request, name: str) -> str:
    """A parameter; empty where it was not given."""
    return request.query_params.get(name, "").strip()


def offset(request: Request) -> int:
    """The place of a list's first item; 0 for whatever is no such place."""
    given = word(request, "offset")
    return min(int(given), 10**9) if given.isdecimal() and len(given) < 12 else 0


def number(request: Request, name: str) -> float | None:
    """A figure.

    Raises:
        ValueError: If something else was given.
    """
    given = word(request, name)
    if not given:
        return None
    value = float(given)
    if not math.isfinite(value):
        raise ValueError(f"{given} is no finite number")
    return value


def day(request: Request, name: str) -> float | None:
    """The beginning of a day in UTC; None for whatever is no date."""
    try:
        return datetime.fromisoformat(word(request, name)).replace(tzinfo=UTC).timestamp()
    except (ValueError, OverflowError):
        return None
