"""Warnings for renamed settings and Python names, which keep working under their old names."""

import importlib
import re
import sys
import warnings
from typing import Any, Final

MOVED: Final = {
    "nemo_rl_core.data.collate": {
        "collate": "nemo_rl_core.distributed.batched_data_dict:collate",
    },
    "tasks.platform": {},
    "tasks.platform.stage": {
        "cached_task": "tasks.stage.stage:cached_task",
        "make": "tasks.stage.stage:make",
    },
}
"""Former modules that this documentation named, with the new module of each of their names."""

_INTERNAL: Final = re.compile(r"(nemo_rl_core|tasks|workflows|pydantic|pydantic_core|importlib)\b")
_shown: dict[str, dict[Any, Any]] = {}


def warn_renamed(old: str, new: str, location: str | None = None) -> None:
    """Warns once at the location of a recipe's key, or at the caller outside of this project.

    Args:
        location: File and line, or the argument of a command; by default the caller is found.
    """
    file, _, line = (location or _caller()).rpartition(":")
    is_line = line.isdecimal()
    text = f"{old!r} is now called {new!r}; use the new name"
    # Python shows a DeprecationWarning only of `__main__`: the user's code or recipe.
    warnings.warn_explicit(
        text if is_line else f"{location}: {text}",
        DeprecationWarning,
        filename=file if is_line else "nemo-rl",
        lineno=int(line) if is_line else 1,
        module="__main__",
        registry=_shown.setdefault(file, {}),
    )


def _caller() -> str:
    frame = sys._getframe(1)
    while frame.f_back and _INTERNAL.match(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def moved(module: str, name: str) -> Any:
    """Resolves a name of a former module, with a warning.

    Raises:
        AttributeError: If the module did not have the name.
    """
    target = MOVED[module].get(name)
    if target is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    new_module, _, attribute = target.partition(":")
    warn_renamed(f"{module}.{name}", f"{new_module}.{attribute}")
    return getattr(importlib.import_module(new_module), attribute)
