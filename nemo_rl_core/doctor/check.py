"""A check and its result; all checks, in the order in which they are shown."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from nemo_rl_core.infra.store import Store

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


@dataclass(frozen=True)
class Answer:
    """A check's name, its result, and how long it took."""

    name: str
    result: Result
    seconds: float


def all_checks() -> list[Check]:
    """Every check."""
    from nemo_rl_core.doctor import machine, services, software

    return [*software.CHECKS, *machine.CHECKS, *services.CHECKS]


def diagnose(store: Store, *, quick: bool = False) -> Iterator[Answer]:
    """Asks everything, several things at once; yields the answers in order.

    Args:
        store: Where runs will write.
        quick: Leave out what starts programs.
    """
    chosen = [check for check in all_checks() if not (quick and check.is_slow)]
    with ThreadPoolExecutor(max_workers=4) as pool:
        yield from pool.map(lambda check: _answer(check, store), chosen)


def _answer(check: Check, store: Store) -> Answer:
    began = time.monotonic()
    try:
        result = check.ask(store)
    except Exception as error:  # noqa: BLE001  (the boundary: a check that breaks is a finding)
        result = Result("warn", f"the check itself failed: {error!r}", "please report this")
    return Answer(check.name, result, time.monotonic() - began)
