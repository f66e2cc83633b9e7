"""Plain data as JSON and back with its types, for the exchange between the two processes."""

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from enum import Enum
from importlib import import_module
from typing import Any

Encoded = Any
"""JSON value: text, number, true, false, null, or a list `[type, content]`."""

_LARGEST_PLAIN = 2**53
_SEQUENCES: dict[str, type[Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}
_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "Counter": Counter,
    "OrderedDict": OrderedDict,
    "defaultdict": lambda items: defaultdict(None, items),
    "dict_keys": lambda items: dict(items).keys(),
    "dict_values": lambda items: dict(items).values(),
    "dict_items": lambda items: dict(items).items(),
}
_VALUES: dict[str, Callable[[Any], list[Any]]] = {
    "fractions.Fraction": lambda value: [value.numerator, value.denominator],
    "decimal.Decimal": lambda value: [str(value)],
    "datetime.date": lambda value: [value.year, value.month, value.day],
    "datetime.time": lambda value: [value.hour, value.minute, value.second, value.microsecond],
    "datetime.datetime": lambda value: [*value.timetuple()[:6], value.microsecond],
    "datetime.timedelta": lambda value: [value.days, value.seconds, value.microseconds],
    "uuid.UUID": lambda value: [str(value)],
}
"""Constructor arguments of an equal object, by the full name of a standard library class."""

_CONTAINERS = {each: name for name, each in _SEQUENCES.items()}
_CONTAINERS |= {dict: "dict", Counter: "Counter", OrderedDict: "OrderedDict"}
_CONTAINERS |= {defaultdict: "defaultdict"}
_EMPTY: dict[Any, Any] = {}
_VIEWS = {type(each) for each in (_EMPTY.keys(), _EMPTY.values(), _EMPTY.items())}
_COPIED: dict[type[Any], Callable[[Any], Any]] = {
    list: list.copy,
    dict: dict.copy,
    tuple: lambda value: tuple(tuple.__iter__(value)),
    set: lambda value: {*set.__iter__(value)},
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
    int: int.__int__,
    str: str.__str__,
    float: float.__float__,
}


def encode(  # noqa: C901, PLR0911 (a table)
    value: Any, other: Callable[[Any], Encoded]
) -> Encoded:
    """Encodes a value for `json.dumps`; subclasses of numbers and `str` become their base class.

    `other` encodes values that are not plain data, or raises.

    Example:
        >>> encode((1, {"a": None}), repr)
        ['tuple', [1, ['dict', [['a', None]]]]]
    """
    # Not `isinstance`, which also reads the `__class__` of a value.
    kind = type(value)
    if value is None or kind is bool:
        return value
    if issubclass(kind, Enum):
        return other(value)
    if issubclass(kind, int):
        # Hexadecimal has no limit on digits, and the conversion takes linear time.
        return int(value) if abs(value) < _LARGEST_PLAIN else ["int", hex(value)]
    if issubclass(kind, float):
        return ["float", float(value).hex()]
    if issubclass(kind, complex):
        return ["complex", [float(value.real).hex(), float(value.imag).hex()]]
    if issubclass(kind, str):
        return str(value)
    if issubclass(kind, (bytes, bytearray)):
        return ["bytes", bytes(value).hex()]
    if kind is range or kind is slice:
        return [
            kind.__name__,
            [encode(each, other) for each in (value.start, value.stop, value.step)],
        ]
    if name := _CONTAINERS.get(kind):
        if issubclass(kind, dict):
            return [name, [[encode(k, other), encode(v, other)] for k, v in value.items()]]
        return [name, [encode(each, other) for each in value]]
    if kind in _VIEWS:
        pairs = value.mapping.items()
        return [kind.__name__, [[encode(k, other), encode(v, other)] for k, v in pairs]]
    full = f"{kind.__module__}.{kind.__qualname__}"
    if full in _VALUES and _is_genuine(kind) and getattr(value, "tzinfo", None) is None:
        return ["value", [full, [encode(each, other) for each in _VALUES[full](value)]]]
    return other(value)


def _is_genuine(kind: type[Any]) -> bool:
    """Whether a class is really the standard library class of its name."""
    return getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind


def decode(encoded: Encoded, other: Callable[[str, Any], Any]) -> Any:  # noqa: PLR0911 (a table)
    """Reverses `encode`; `other` decodes the type and content of values that are not plain data."""
    if encoded is None or isinstance(encoded, (bool, int, str)):
        return encoded
    if not isinstance(encoded, list):
        raise ValueError(f"a bare {type(encoded).__name__} is never sent")
    kind, content = encoded
    match kind:
        case "int":
            return int(content, 16)
        case "float":
            return float.fromhex(content)
        case "complex":
            return complex(*map(float.fromhex, content))
        case "bytes":
            return bytes.fromhex(content)
        case "range" | "slice":
            constructor: Any = range if kind == "range" else slice
            return constructor(*(decode(each, other) for each in content))
        case "value":
            full, arguments = content
            if full not in _VALUES:
                raise ValueError(f"unknown class {full!r}")
            module, _, name = full.rpartition(".")
            constructor = getattr(import_module(module), name)
            return constructor(*(decode(each, other) for each in arguments))
    if kind in _MAPPINGS:
        pairs = {decode(key, other): decode(value, other) for key, value in content}
        return pairs if kind == "dict" else _MAPPINGS[kind](pairs)
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(each, other) for each in content)
    return other(kind, content)


def content_of(value: Any) -> Any:
    """Returns the plain data in an object of a subclass, or the object itself if there is none.

    Example:
        >>> class Names(list): ...
        >>> type(content_of(Names("ab")))
        <class 'list'>
    """
    kind = type(value)
    for base, copied in _COPIED.items():
        if issubclass(kind, base):
            return copied(value)
    return value
