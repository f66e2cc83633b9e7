"""Runs all checks in display order."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from nemo_rl_core.maintenance.doctor import machine, software
from nemo_rl_core.maintenance.doctor.check import Check, Result
from nemo_rl_core.store.store import Store

CHECKS = (*software.CHECKS, *machine.CHECKS)


@dataclass(frozen=True)
class CheckResult:
    """Name, result and duration of a check."""

    name: str
    result: Result
    seconds: float


def diagnose(
    store: Store, *, checks: Sequence[Check] = CHECKS, quick: bool = False
) -> Iterator[CheckResult]:
    """Runs the checks in parallel; yields results in order. `quick` skips slow checks."""
    chosen = [check for check in checks if not (quick and check.is_slow)]
    with ThreadPoolExecutor(max_workers=4) as pool:
        yield from pool.map(lambda check: _run(check, store), chosen)


def _run(check: Check, store: Store) -> CheckResult:
    start = time.monotonic()
    try:
        result = check.run(store)
    except Exception as error:  # noqa: BLE001  (a broken check is a finding)
        result = Result("warn", f"the check itself failed: {error!r}", "please report this")
    return CheckResult(check.name, result, time.monotonic() - start)
