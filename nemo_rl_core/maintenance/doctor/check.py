"""A check and its result."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from nemo_rl_core.store.store import Store

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Result:
    """The result of a check.

    Attributes:
        state: "fail" if no run can work, "warn" if some runs or features cannot.
    """

    state: State
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Check:
    """A check of this machine; a slow one starts programs that take seconds."""

    name: str
    run: Callable[[Store], Result]
    is_slow: bool = False
