"""Two configs beside each other: only what differs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MISSING = "—"
"""Shown where one side has no such field."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A field whose value is not the same.

    Attributes:
        field: Its path, such as `config.grpo.num_iterations`.
        before: Its JSON on the one side, or `MISSING`.
        after: On the other.
    """

    field: str
    before: str
    after: str

    @property
    def is_shared(self) -> bool:
        """Whether both sides have the field."""
        return MISSING not in (self.before, self.after)


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """The fields that differ, by their paths in order.

    Example:
        >>> differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}})
        [Difference(field='a.c', before='2', after='3')]
    """
    old, new = _flat(before), _flat(after)
    return [
        Difference(field, old.get(field, MISSING), new.get(field, MISSING))
        for field in sorted(old.keys() | new.keys())
        if old.get(field, MISSING) != new.get(field, MISSING)
    ]


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    fields: dict[str, str] = {}
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            fields |= _flat(item, f"{prefix}{key}.")
        else:
            fields[f"{prefix}{key}"] = json.dumps(item, ensure_ascii=False, sort_keys=True)
    return fields
