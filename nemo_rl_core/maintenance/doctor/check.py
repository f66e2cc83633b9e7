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
        state: "fail" if runs cannot work, "warn" if some cannot or something is lost.
        found: Description of this machine's state.
        fix: The fix; empty if none is needed.
    """

    state: State
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Check:
    """A check of this machine.

    Attributes:
        name: Name in the output.
        run: Runs the check.
        is_slow: True if it starts programs that take seconds.
    """

    name: str
    run: Callable[[Store], Result]
    is_slow: bool = False
