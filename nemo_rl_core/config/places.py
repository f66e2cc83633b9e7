"""Where each value of a recipe was written: the file and line, or the word of a command line.

The places travel with the values. So a mistake that is found after recipes were laid over one
another is still named with the file that holds it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self


class PlacedDict(dict[Any, Any]):
    """A mapping that knows where each of its keys was written.

    Attributes:
        places: By key: `mine.yaml:12`, or `the argument seed=x`. Keys without one have none.
    """

    places: dict[Any, str]

    def __init__(self, values: Mapping[Any, Any] = {}, places: Mapping[Any, str] = {}) -> None:
        super().__init__(values)
        self.places = dict(places)

    def copy(self) -> Self:
        """A copy with the same places."""
        return type(self)(self, self.places)


class PlacedList(list[Any]):
    """A list that knows where each of its items was written.

    Attributes:
        places: In the order of the items.
    """

    places: Sequence[str]

    def __init__(self, values: Sequence[Any] = (), places: Sequence[str] = ()) -> None:
        super().__init__(values)
        self.places = list(places)


def place_of(values: Any, path: Sequence[str | int]) -> str | None:
    """Where the value at `path` was written, or the innermost section around it that is known.

    Example:
        >>> values = PlacedDict({"grpo": {"seed": 1}}, {"grpo": "mine.yaml:3"})
        >>> place_of(values, ("grpo", "seed"))
        'mine.yaml:3'
    """
    found = None
    for part in path:
        places = getattr(values, "places", None)
        if isinstance(values, Mapping) and part in values:
            found = (places or {}).get(part, found)
        elif isinstance(values, list) and isinstance(part, int) and part < len(values):
            found = places[part] if places else found
        else:
            break
        values = values[part]
    return found


def copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """A dict with the values of a mapping, and their places if it knows any."""
    return PlacedDict(values, getattr(values, "places", {}))


def overlaid(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `base` with those of `changes` in their stead, each with its place."""
    places = {key: at for key, at in getattr(base, "places", {}).items() if key not in changes}
    places |= getattr(changes, "places", {})
    return PlacedDict({**base, **changes}, places)


def without_keys(values: Mapping[str, Any], keys: set[str]) -> dict[str, Any]:
    """A copy of a mapping that lacks some keys."""
    kept = {key: value for key, value in values.items() if key not in keys}
    return PlacedDict(kept, getattr(values, "places", {}))
