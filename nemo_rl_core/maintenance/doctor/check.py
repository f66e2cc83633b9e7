"""A check and its result."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from nemo_rl_core.store.store import Store

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Result:
    """What a check has found.

    Attributes:
        state: "fail" where runs cannot work, "warn" where some cannot or something is lost.
        found: On this machine.
        fix: What to do; empty where nothing is to be done.
    """

    state: State
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Check:
    """A question to this machine.

    Attributes:
        name: What it is about.
        ask: Answers it; may take a while where `is_slow`.
        is_slow: It starts programs that take seconds.
    """

    name: str
    ask: Callable[[Store], Result]
    is_slow: bool = False
