"""The reference of the Python API: what the packages of the library export.

A name that a package hands on is described where it is defined, so that each one stands once. The
text itself is mkdocstrings', which reads the sources and imports nothing.
"""

import importlib
import inspect
import sys
import types
from collections.abc import Iterator, Sequence

FOLDER = "reference/api"

PAGES: dict[str, tuple[str, Sequence[str]]] = {
    "train": ("Training", ["nemo_rl_core", "nemo_rl_core.api"]),
    "algorithms": ("Losses", ["nemo_rl_core.algorithms"]),
    "functional": (
        "Functional",
        [
            "nemo_rl_core.functional.advantages",
            "nemo_rl_core.functional.policy_gradient",
            "nemo_rl_core.functional.kl",
            "nemo_rl_core.functional.preference",
            "nemo_rl_core.functional.distillation",
            "nemo_rl_core.functional.value",
            "nemo_rl_core.functional.rewards",
            "nemo_rl_core.functional.logprobs",
            "nemo_rl_core.functional.masked",
        ],
    ),
    "environments": (
        "Environments",
        [
            "nemo_rl_core.environments.interfaces",
            "nemo_rl_core.environments.adapt",
            "nemo_rl_core.environments.factory",
            "nemo_rl_core.environments.rewards.functional_reward",
            "nemo_rl_core.environments.tools",
            "nemo_rl_core.environments.sandbox",
        ],
    ),
    "data": (
        "Data",
        [
            "nemo_rl_core.data.frames",
            "nemo_rl_core.data.record_frames",
            "nemo_rl_core.data.schemas",
            "nemo_rl_core.data.loader",
        ],
    ),
    "models": (
        "Policies and engines",
        ["nemo_rl_core.models", "nemo_rl_core.models.generation", "nemo_rl_core.models.validation"],
    ),
    "distributed": ("Workers", ["nemo_rl_core.distributed", "nemo_rl_core.backends"]),
    "evals": (
        "Statistics",
        [
            "nemo_rl_core.evals.statistics",
            "nemo_rl_core.evals.comparison",
        ],
    ),
    "errors": ("Types and errors", ["nemo_rl_core.types", "nemo_rl_core.errors"]),
}
"""File to its title, and the packages or modules whose names it describes."""


def pages() -> dict[str, str]:
    """The Markdown of each page, by its path below `docs/`."""
    seen: set[str] = set()
    written = {}
    for file, (title, modules) in PAGES.items():
        parts = [f"# {title}"]
        for name in modules:
            parts += _described(name, seen)
        written[f"{FOLDER}/{file}.md"] = "\n\n".join(parts) + "\n"
    return written


def _described(name: str, seen: set[str]) -> Iterator[str]:
    """Yields the lines of a page about a package's exports, or about a full module."""
    module = importlib.import_module(name)
    places = [place for place in _places(module) if place not in seen]
    seen.update(places)
    if places or not hasattr(module, "__all__"):
        about = (module.__doc__ or "").strip().partition("\n")[0]
        yield f"## `{name}`\n\n{about}"
    for place in places:
        yield f"::: {place}\n    options: {{heading_level: 3}}"


def _places(module: types.ModuleType) -> Iterator[str]:
    """Returns where the public names of a module are defined, in the module's order."""
    exported = getattr(module, "__all__", None)
    defined = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    for name in exported or defined:
        yield _place(module, name)


def _place(module: types.ModuleType, name: str) -> str:
    """Where a name is defined; `register_algorithm`, a bound method, where it got its name."""
    value = getattr(module, name)
    home = getattr(value, "__module__", module.__name__)
    if inspect.ismethod(value):
        # A copy: to look into a module that is loaded on demand loads it, and what it imports.
        holders = [
            holder
            for holder, loaded in list(sys.modules.items())
            if getattr(loaded, "__dict__", {}).get(name) is value
        ]
        return f"{max(holders, key=len)}.{name}"
    defined = home.startswith("nemo_rl_core") and hasattr(value, "__qualname__")
    return f"{home}.{value.__qualname__}" if defined else f"{module.__name__}.{name}"
