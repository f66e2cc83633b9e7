"""Settings of runs: those that differ from each other, and those given besides a recipe."""

import functools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nemo_rl_core.history.differences import MISSING, flat
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.rows import read_row

_PREFIX = re.compile(r"(config|settings)\.(base\.)?")
_NOT_SETTINGS = ("trainer", "reward_sha256", "unrepeatable", "points")


class _Inputs(NamedTuple):
    id: str
    command: list[str]
    inputs: dict[str, Any]


@functools.lru_cache(maxsize=16384)
def read_settings(
    history: History, run: str, _started_at: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns settings by dotted path, and those given to the command besides its recipe."""
    rows = history.select("SELECT id, command, inputs FROM executions WHERE id = ?", (run,))
    record = read_row(_Inputs, rows[0], table="executions", key="id", store=history.store)
    return _plain(flat(record.inputs)), _overrides(record.command)


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        sys.intern(_PREFIX.sub("", name, count=1)): value
        for name, value in settings.items()
        if name.partition(".")[0] not in _NOT_SETTINGS
    }


def _overrides(command: Sequence[str]) -> dict[str, Any]:
    """Settings in a command besides its recipe: `--config JSON`, or words like `a.b=1`."""
    changed: dict[str, Any] = {}
    for word in command:
        try:
            config = json.loads(word) if word.startswith("{") else None
        except ValueError:
            continue
        if isinstance(config, dict) and "recipe" in config:
            changed |= {name: value for name, value in flat(config).items() if name != "recipe"}
        elif config is None and (match := re.fullmatch(r"([a-z]\w*(?:\.\w+)*)=(.*)", word)):
            changed[match[1]] = match[2]
    return changed


def num_steps_of(settings: Mapping[str, Any], stage: str) -> int | None:
    """Returns the number of steps of all iterations of a training stage, if the settings have it.

    Example:
        >>> num_steps_of({"grpo.num_iterations": 2, "grpo.num_steps_per_iteration": 12}, "grpo")
        24
    """
    name = stage.removeprefix("train_").removesuffix("_iteration")
    name = {"student": "distillation"}.get(name, name)
    steps = settings.get(f"{name}.num_steps", settings.get(f"{name}.num_steps_per_iteration"))
    iterations = settings.get(f"{name}.num_iterations", 1)
    return steps * iterations if isinstance(steps, int) and isinstance(iterations, int) else None


def setting_value(settings: Mapping[str, Any], name: str) -> Any:
    """Returns a setting, or of a section its settings as text; MISSING if there is neither.

    Example:
        >>> setting_value({"overlong.kind": "linear", "overlong.tokens": 8}, "overlong")
        'kind linear, tokens 8'
    """
    if name in settings:
        return settings[name]
    inner = {key: value for key, value in settings.items() if key.startswith(f"{name}.")}
    return ", ".join(f"{key[len(name) + 1 :]} {value}" for key, value in inner.items()) or MISSING


def differing_settings(settings: Sequence[Mapping[str, Any]]) -> set[str]:
    """Returns the names whose values differ.

    A setting that only some runs have is left out if they differ in the kind or backend of its
    section, or in whether the section is set: that difference is one setting.
    """
    everything = {name for each in settings for name in each}
    values = {name: {repr(each.get(name, MISSING)) for each in settings} for name in everything}
    changed = {name for name in everything if len(values[name]) > 1}
    partial = {name for name in changed if repr(MISSING) in values[name]}

    def is_implied(name: str) -> bool:
        parts = name.split(".")
        sections = [".".join(parts[:length]) for length in range(1, len(parts))]
        return any(
            f"{section}.{key}" in changed and name != f"{section}.{key}"
            for section in sections
            for key in ("kind", "backend")
        ) or any(section in partial for section in sections)

    return {name for name in changed if name not in partial or not is_implied(name)}
