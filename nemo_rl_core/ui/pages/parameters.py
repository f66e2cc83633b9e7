"""Parameters of requests."""

import math
from datetime import UTC, datetime

from starlette.exceptions import HTTPException
from starlette.requests import Request

from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import NodeDetail


def history_of(request: Request) -> History:
    """The history that the application serves.

    Raises:
        StoreError: If it does not exist or cannot be read.
    """
    found: History = request.app.state.source.history()
    return found


def node_of(request: Request) -> NodeDetail:
    """The node in the path of the request.

    Raises:
        HTTPException: If its id is larger than the database's largest.
        StoreError: If there is no such node.
    """
    number = request.path_params["node"]
    if number >= 2**63:
        raise HTTPException(404, f"The store has no record of the node {number}.")
    return history_of(request).node(number)


def parameter(request: Request, name: str) -> str:
    """A parameter of the query; empty if missing."""
    return request.query_params.get(name, "").strip()


def offset(request: Request) -> int:
    """Index of a list's first item; 0 if missing or invalid."""
    given = parameter(request, "offset")
    return min(int(given), 10**9) if given.isdecimal() and len(given) < 12 else 0


def number_parameter(request: Request, name: str) -> float | None:
    """A number; None if missing.

    Raises:
        ValueError: If the parameter is not a finite number.
    """
    given = parameter(request, name)
    if not given:
        return None
    value = float(given)
    if not math.isfinite(value):
        raise ValueError(f"{given} is not a finite number")
    return value


def day(request: Request, name: str) -> float | None:
    """The beginning of a day in UTC, as Unix time; None if missing or invalid."""
    try:
        return datetime.fromisoformat(parameter(request, name)).replace(tzinfo=UTC).timestamp()
    except (ValueError, OverflowError):
        return None
