"""Differences between two configs, field by field."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MISSING = "(not set)"


@dataclass(frozen=True, slots=True)
class Difference:
    """A field, by its dotted path, with both values; `MISSING` if a config lacks it."""

    field: str
    before: Any
    after: Any


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Flattens a nested config to dotted paths.

    Example:
        >>> flat({"grpo": {"kl": 0.1, "parts": [1, {"a": 2}]}})
        {'grpo.kl': 0.1, 'grpo.parts.0': 1, 'grpo.parts.1.a': 2}
    """
    if isinstance(config, Mapping):
        items: list[tuple[Any, Any]] = list(config.items())
    elif isinstance(config, Sequence) and not isinstance(config, str):
        items = list(enumerate(config))
    else:
        return {prefix: config}
    if not items and prefix:
        return {prefix: config}
    fields: dict[str, Any] = {}
    for key, value in items:
        fields |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return fields


def differences(before: Any, after: Any) -> list[Difference]:
    """Returns the fields that differ, sorted by name.

    Example:
        >>> differences({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}})
        [Difference(field='b.c', before=2, after=3)]
    """
    old, new = flat(before), flat(after)
    return [
        Difference(name, old.get(name, MISSING), new.get(name, MISSING))
        for name in sorted({*old, *new})
        if name not in old or name not in new or old[name] != new[name]
    ]
