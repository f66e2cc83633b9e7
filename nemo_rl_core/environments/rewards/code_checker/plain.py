"""Plain data as JSON and back, types kept; nothing else can cross between the two processes."""

from collections.abc import Callable
from typing import Any

Encoded = Any
"""What `json` can write: text, numbers, true, false, null, and lists `[type, content]`."""

_LARGEST_PLAIN = 2**53
_SEQUENCES: dict[str, type[Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


def encode(value: Any, other: Callable[[Any], Encoded]) -> Encoded:  # noqa: PLR0911 (a table)
    """A value for `json.dumps`; subclasses become what they are made of.

    Args:
        value: Anything.
        other: Encodes what is no plain data, or raises.

    Example:
        >>> encode((1, {"a": None}), repr)
        ['tuple', [1, ['dict', [['a', None]]]]]
    """
    # Of the type, since `isinstance` also asks a value for its `__class__`.
    kind = type(value)
    if value is None or issubclass(kind, bool):
        return value
    if issubclass(kind, int):
        # Hexadecimal has no limit on digits, and takes time in proportion to them.
        return int(value) if abs(value) < _LARGEST_PLAIN else ["int", hex(value)]
    if issubclass(kind, float):
        return ["float", float(value).hex()]
    if issubclass(kind, complex):
        return ["complex", [float(value.real).hex(), float(value.imag).hex()]]
    if issubclass(kind, str):
        return str(value)
    if issubclass(kind, (bytes, bytearray)):
        return ["bytes", bytes(value).hex()]
    if issubclass(kind, dict):
        return ["dict", [[encode(k, other), encode(v, other)] for k, v in value.items()]]
    for name, sequence in _SEQUENCES.items():
        if issubclass(kind, sequence):
            return [name, [encode(each, other) for each in value]]
    return other(value)


def decode(said: Encoded, other: Callable[[str, Any], Any]) -> Any:  # noqa: PLR0911 (a table)
    """The value that `encode` was given.

    Args:
        said: What `json.loads` gave; it may come from a hostile program.
        other: Called with type and content of what is no plain data.

    Raises:
        ValueError, TypeError, RecursionError: If it was not made by `encode`.
    """
    if said is None or isinstance(said, (bool, int, str)):
        return said
    if not isinstance(said, list):
        raise ValueError(f"a bare {type(said).__name__} is never sent")
    kind, content = said
    match kind:
        case "int":
            return int(content, 16)
        case "float":
            return float.fromhex(content)
        case "complex":
            return complex(*map(float.fromhex, content))
        case "bytes":
            return bytes.fromhex(content)
        case "dict":
            return {decode(key, other): decode(value, other) for key, value in content}
        case "list" | "tuple" | "set" | "frozenset":
            return _SEQUENCES[kind](decode(each, other) for each in content)
        case _:
            return other(kind, content)
