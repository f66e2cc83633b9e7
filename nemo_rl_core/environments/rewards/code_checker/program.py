"""Runs a completion's program, and calls its functions when the checker asks.

The program may do to this process whatever it likes: all that leaves it is what a call returned.
"""

import json
import os
from pathlib import Path
from typing import Any

from nemo_rl_core.environments.rewards.code_checker.plain import Encoded, decode, encode
from nemo_rl_core.environments.rewards.code_checker.streams import silence


class _MissingNameError(Exception):
    """The program does not define a name that the row declares."""


def main() -> None:
    """Answers one call a line until stdin closes."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    silence()
    # Not __main__: what a program does when it is run as a script is not what is tested.
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(Path("program.py").read_text(encoding="utf-8"), "program.py", "exec"), names)
    kept: dict[int, Any] = {}
    for line in requests:
        replies.write(json.dumps(_reply(json.loads(line), names, kept)).encode() + b"\n")
        replies.flush()


def _reply(request: dict[str, Any], names: dict[str, Any], kept: dict[int, Any]) -> Encoded:
    def keep(value: Any) -> Encoded:
        """What is no plain data stays here; the checker gets its number."""
        kept[id(value)] = value
        return ["callable" if callable(value) else "kept", id(value)]

    def kept_or_named(kind: str, content: Any) -> Any:
        if kind == "kept":
            return kept[content]
        if content not in names:
            raise _MissingNameError(content)
        return names[content]

    # Named fault boundary: what a call raises is its result, which the test compares.
    try:
        value = decode(request["of"], kept_or_named)
        for attribute in request["attributes"]:
            value = getattr(value, attribute)
        if "arguments" in request:
            value = value(
                *decode(request["arguments"], kept_or_named),
                **decode(request["keywords"], kept_or_named),
            )
        return ["returned", encode(value, keep)]
    except _MissingNameError as error:
        return ["missing", str(error)]
    except Exception as error:  # noqa: BLE001 (sent to the checker)
        return ["raised", [type(error).__name__, str(error)[:200]]]
