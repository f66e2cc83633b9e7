"""Runs a row's unit tests against a program that lives in another process.

A name that the row declares is bound to a `Remote`, and calling that asks the other process. What
comes back is plain data, so comparing it involves this process only: an object that claims to be
equal to everything, a patched `assert`, an early exit or a printed "passed" have no effect.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from nemo_rl_core.environments.rewards.code_checker.expected import (
    CAUGHT,
    WATCHED,
    Watched,
    with_notes,
)
from nemo_rl_core.environments.rewards.code_checker.names import (
    bound,
    names_read,
    package_folders,
    resolved,
    wrong_names,
)
from nemo_rl_core.environments.rewards.code_checker.remote import (
    BrokenTestError,
    CallableRemote,
    Connection,
    Reference,
)
from nemo_rl_core.environments.rewards.code_checker.streams import silence


def run_test(source: str, setup: str, declared: tuple[str, ...], connection: Connection) -> bool:
    """Returns whether a test passes.

    Args:
        source: The test.
        setup: Python that runs before it.
        declared: Names of the program.
        connection: The program.

    Raises:
        BrokenTestError: If every program gets the same verdict: the test cannot be compiled, it
            uses a name that is neither defined nor declared, its setup raises, or it passes or
            fails before it has asked the program for anything.
    """
    names: dict[str, Any] = {
        "__name__": "unit_test",
        CAUGHT: lambda: connection.catch(sys.exc_info()[1]),
        WATCHED: partial(Watched, report=connection.catch),
    }
    # Named fault boundaries: a setup that raises is the row's fault, for the program's names are
    # not known to it yet; a test that does has failed.
    try:
        if wrong := wrong_names(setup, source, declared):
            raise BrokenTestError(wrong.why)
        code = with_notes(source, "the test")
        exec(with_notes(setup, "the setup"), names)
        for name, taken in names_read(setup, source).items():
            if name in declared:
                names.setdefault(name, CallableRemote(Reference(connection, ["named", name])))
            elif origin := resolved(name, taken):
                names.setdefault(name, bound(*origin))
    except BrokenTestError:
        raise
    except BaseException as error:
        raise BrokenTestError(f"{type(error).__name__}: {error}") from error
    connection.has_asked = connection.has_failed = False
    connection.uncaught.clear()
    why = "it passes"
    try:
        exec(code, names)
    except BrokenTestError:
        raise
    except BaseException as error:  # noqa: BLE001 (see above)
        why = f"{type(error).__name__}: {error}"
    if not connection.has_asked:
        raise BrokenTestError(f"{why}, before it has asked the program for anything")
    forged = connection.is_gone or connection.has_failed or connection.uncaught
    return why == "it passes" and not forged


def import_packages() -> None:
    """Lets tests import the packages that are installed here, on one thread."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    sys.path += package_folders()


def main() -> None:
    """Reads `tests.json`; reports on stderr, one line per test.

    `[index, passed]` after each test, or `["broken", why]`.
    """
    report = os.fdopen(os.dup(2), "w", encoding="utf-8")
    requests, replies = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    silence()
    import_packages()
    stored = json.loads(Path("tests.json").read_text(encoding="utf-8"))
    connection = Connection(requests, replies)
    declared = tuple(stored["declared"])
    for index, source in enumerate(stored["tests"]):
        line: list[Any]
        try:
            line = [index, run_test(source, stored["setup"], declared, connection)]
        except BrokenTestError as error:
            line = ["broken", f"test {index}: {error}"[:300]]
        report.write(json.dumps(line) + "\n")
        report.flush()
