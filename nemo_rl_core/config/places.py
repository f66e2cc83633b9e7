"""Source locations of recipe values: a file and line, or a command-line argument."""

from collections.abc import Mapping, Sequence
from typing import Any, Self


class PlacedDict(dict[Any, Any]):
    """A mapping with the source locations of its keys.

    Attributes:
        places: Locations by key, `mine.yaml:12` or `the argument seed=x`, as far as known.
    """

    places: dict[Any, str]

    def __init__(self, values: Mapping[Any, Any] = {}, places: Mapping[Any, str] = {}) -> None:
        super().__init__(values)
        self.places = dict(places)

    def copy(self) -> Self:
        """Returns a copy with the same locations."""
        return type(self)(self, self.places)


class PlacedList(list[Any]):
    """A list with the source locations of its items.

    Attributes:
        places: Locations in the order of the items.
    """

    places: Sequence[str]

    def __init__(self, values: Sequence[Any] = (), places: Sequence[str] = ()) -> None:
        super().__init__(values)
        self.places = list(places)


def place_of(values: Any, path: Sequence[str | int]) -> str | None:
    """Returns the location of the value at `path`, or of the innermost section with one.

    Example:
        >>> values = PlacedDict({"grpo": {"seed": 1}}, {"grpo": "mine.yaml:3"})
        >>> place_of(values, ("grpo", "seed"))
        'mine.yaml:3'
    """
    location = None
    for part in path:
        locations = getattr(values, "places", None)
        if isinstance(values, Mapping) and part in values:
            location = (locations or {}).get(part, location)
        elif isinstance(values, list) and isinstance(part, int) and part < len(values):
            location = locations[part] if locations else location
        else:
            break
        values = values[part]
    return location


def copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copies a mapping to a dict, with locations if it has any."""
    return PlacedDict(values, getattr(values, "places", {}))


def overlaid(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of `base` updated by `changes`, each with its location."""
    locations = {key: at for key, at in getattr(base, "places", {}).items() if key not in changes}
    locations |= getattr(changes, "places", {})
    return PlacedDict({**base, **changes}, locations)


def without_keys(values: Mapping[str, Any], keys: set[str]) -> dict[str, Any]:
    """Returns a copy of a mapping without some keys."""
    kept = {key: value for key, value in values.items() if key not in keys}
    return PlacedDict(kept, getattr(values, "places", {}))
