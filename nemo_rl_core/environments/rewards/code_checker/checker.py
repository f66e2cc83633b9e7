"""Runs a row's unit tests against a program in another process.

A name that the row declares is bound to a `Remote`, and calling that sends a request to the other
process. The reply is plain data, which is compared in this process: an object that claims to be
equal to everything, a patched `assert`, an early exit or a printed "passed" have no effect.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from nemo_rl_core.environments.rewards.code_checker.connection import (
    BrokenTestError,
    Connection,
)
from nemo_rl_core.environments.rewards.code_checker.expected import (
    CAUGHT,
    KIND,
    KINDS,
    SUBCLASS,
    TEST,
    UNUSED,
    WATCHED,
    Watched,
    instrumented,
)
from nemo_rl_core.environments.rewards.code_checker.names import (
    import_origin,
    names_read,
    package_folders,
    resolved,
    wrong_names,
)
from nemo_rl_core.environments.rewards.code_checker.operators import install
from nemo_rl_core.environments.rewards.code_checker.remote import (
    CallableRemote,
    Reference,
    class_of,
    is_subclass,
    kind_of,
    make_remote,
    unused,
    uses_objects,
)
from nemo_rl_core.environments.rewards.code_checker.results import IS_RESULT, VALUES, is_result
from nemo_rl_core.environments.rewards.code_checker.runs import is_script, run_defined
from nemo_rl_core.environments.rewards.code_checker.streams import silence


def run_test(source: str, setup: str, declared: tuple[str, ...], connection: Connection) -> bool:
    """Returns whether a test passes, after its setup.

    Raises:
        BrokenTestError: If every program gets the same verdict: the test cannot be compiled, it
            uses a name that is neither defined nor declared, its setup raises, or it passes or
            fails before its first request to the program.
    """
    names: dict[str, Any] = {
        "__name__": "unit_test",
        CAUGHT: lambda: connection.catch(sys.exc_info()[1]),
        WATCHED: partial(
            Watched, report=connection.catch, fail=connection.mark_failed, source=source
        ),
        KINDS: class_of,
        KIND: kind_of,
        SUBCLASS: is_subclass,
        UNUSED: unused,
        IS_RESULT: is_result,
        VALUES: json.loads,
    }
    # Named fault boundaries: a setup that raises is the row's fault, since it cannot use the
    # program's names yet; a test that raises has failed.
    try:
        if wrong := wrong_names(setup, source, declared):
            raise BrokenTestError(wrong.why)
        code = instrumented(source, TEST)
        exec(instrumented(setup, "the setup"), names)
        if is_script(source):
            names["__name__"] = "__main__"
        for name, taken in names_read(setup, source).items():
            if name in declared:
                remote = CallableRemote(Reference(connection, ["named", name]))
                names.setdefault(name, connection.kept.setdefault(name, remote))
            elif origin := resolved(name, taken):
                names.setdefault(name, import_origin(*origin))
    except BrokenTestError:
        raise
    except BaseException as error:
        raise BrokenTestError(f"{type(error).__name__}: {error}") from error
    connection.begin()
    connection.uses_objects = uses_objects(source)
    outcome = "it passes"
    try:
        exec(code, names)
        run_defined(source, names)
    except BrokenTestError:
        raise
    except BaseException as error:  # noqa: BLE001 (see above)
        outcome = f"{type(error).__name__}: {error}"
    if not connection.has_asked:
        raise BrokenTestError(f"{outcome}, before its first request to the program")
    forged = connection.is_gone or connection.has_failed or connection.uncaught
    return outcome == "it passes" and not forged


def import_packages() -> None:
    """Lets tests import the packages that are installed here; BLAS uses one thread."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    sys.path += package_folders()


def main() -> None:
    """Runs the tests of `tests.json`.

    Writes one line per test to stderr: `[index, passed]`, or `["broken", why]`.
    """
    report = os.fdopen(os.dup(2), "w", encoding="utf-8")
    requests, replies = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    silence()
    import_packages()
    stored = json.loads(Path("tests.json").read_text(encoding="utf-8"))
    install()
    connection = Connection(requests, replies, make_remote)
    declared = tuple(stored["declared"])
    for index, source in enumerate(stored["tests"]):
        line: list[Any]
        try:
            line = [index, run_test(source, stored["setup"], declared, connection)]
        except BrokenTestError as error:
            line = ["broken", f"test {index}: {error}"[:300]]
        report.write(json.dumps(line) + "\n")
        report.flush()
