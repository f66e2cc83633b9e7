"""All checks, in the order in which they are shown, and the asking of them."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from nemo_rl_core.maintenance.doctor import machine, services, software
from nemo_rl_core.maintenance.doctor.check import Check, Result
from nemo_rl_core.store.store import Store

CHECKS = (*software.CHECKS, *machine.CHECKS, *services.CHECKS)


@dataclass(frozen=True)
class CheckResult:
    """A check's name, its result, and how long it took."""

    name: str
    result: Result
    seconds: float


def diagnose(
    store: Store, *, checks: Sequence[Check] = CHECKS, quick: bool = False
) -> Iterator[CheckResult]:
    """Asks everything, several things at once; yields the answers in order.

    Args:
        store: Where runs will write.
        checks: What to ask.
        quick: Leave out what starts programs.
    """
    chosen = [check for check in checks if not (quick and check.is_slow)]
    with ThreadPoolExecutor(max_workers=4) as pool:
        yield from pool.map(lambda check: _answer(check, store), chosen)


def _answer(check: Check, store: Store) -> CheckResult:
    began = time.monotonic()
    try:
        result = check.ask(store)
    except Exception as error:  # noqa: BLE001  (the boundary: a check that breaks is a finding)
        result = Result("warn", f"the check itself failed: {error!r}", "please report this")
    return CheckResult(check.name, result, time.monotonic() - began)
