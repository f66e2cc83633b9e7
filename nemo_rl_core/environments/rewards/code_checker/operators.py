"""Operators, and functions such as `len`, on objects of the program; see `remote`."""

import operator
from collections.abc import Callable, Iterator
from typing import Any, cast

from nemo_rl_core.environments.rewards.code_checker.remote import (
    Reference,
    Remote,
    reference_of,
)

_ARITHMETIC = "add sub mul matmul truediv floordiv mod pow lshift rshift and or xor"
_COMPARISONS = "eq ne lt le gt ge"
_UNARY: dict[str, Callable[..., Any]] = {
    **{f"operator.{name}": getattr(operator, name) for name in ("neg", "pos", "abs", "invert")},
    **{f"builtins.{kind.__name__}": kind for kind in (hash, int, float, complex, round)},
    "operator.index": operator.index,
}


def plain_or_same(value: Any) -> Any:
    """Returns the plain data of a `Remote` if it has any, and any other value unchanged."""
    return reference_of(value).value() if isinstance(value, Remote) else value


def _is_trusted(reference: Reference) -> bool:
    """Whether the test is about the object's class: it created the object and used an attribute."""
    connection = reference.connection
    is_object = reference.of[0] == "kept" and not reference.attributes
    return is_object and reference.of[1] in connection.constructed & connection.known


def _compared(name: str) -> Callable[[Remote, Any], Any]:
    function = getattr(operator, name)

    def compare(one: Remote, other: Any) -> Any:
        reference = reference_of(one)
        values = plain_or_same(one), plain_or_same(other)
        are_remote = [isinstance(each, Remote) for each in values]
        if not any(are_remote):
            return function(*values)
        if all(are_remote) or _is_trusted(reference):
            return reference.connection.helped(f"operator.{name}", *values) is True
        if name in ("eq", "ne") and any(each is None for each in values):
            return name == "ne"
        return reference.connection.fail(_FORGED)

    return compare


_FORGED = "the test compares an object of the program with plain data"


def _computed(name: str, *, is_reflected: bool = False) -> Callable[[Remote, Any], Any]:
    function = divmod if name == "divmod" else getattr(operator, f"__{name}__")
    path = "builtins.divmod" if name == "divmod" else f"operator.__{name}__"

    def compute(one: Remote, other: Any) -> Any:
        connection = reference_of(one).connection
        values = [plain_or_same(one), plain_or_same(other)]
        are_remote = [isinstance(each, Remote) for each in values]
        if is_reflected:
            values.reverse()
        if not any(are_remote):
            return function(*values)
        result = connection.helped(path, *values)
        if all(are_remote) or _is_trusted(reference_of(one)):
            return result
        # The program could forge a number that it computes from data of the test.
        if not isinstance(result, Remote):
            connection.fail(_FORGED)
        connection.mixed.add(reference_of(result).number())
        return result

    return compute


def _unary(path: str) -> Callable[..., Any]:
    function = _UNARY[path]

    def compute(one: Remote, *others: Any) -> Any:
        reference = reference_of(one)
        value = reference.value()
        if not isinstance(value, Remote):
            return function(value, *others)
        if reference.number() in reference.connection.mixed and not _is_trusted(reference):
            reference.connection.fail(_FORGED)
        return reference.helped(path, *others)

    return compute


def _truth(one: Remote) -> bool:
    reference = reference_of(one)
    value = reference.value()
    if not isinstance(value, Remote):
        return bool(value)
    batch = reference.items()
    if batch is not None and (batch[0] or batch[1] is None):
        return bool(batch[0])  # true if it has items, like a list
    if not reference.connection.uses_objects:
        reference.connection.fail("the test asks whether an object of the program is true")
    return reference.helped("builtins.bool") is True


def _length(one: Remote) -> int:
    reference = reference_of(one)
    value = reference.value()
    if not isinstance(value, Remote):
        return len(value)
    size: int | None = reference.helped("length")
    if size is None:  # `list` asks for a length too
        raise TypeError("an object of the program has no length")
    reference.items()
    return size


def _iterated(one: Remote) -> Iterator[Any]:
    reference = reference_of(one)
    value = reference.value()
    if not isinstance(value, Remote):
        return iter(value)
    batch = reference.items()
    if batch is not None:
        return _items(*batch)
    error = reference.helped("batch")
    if error is not None:
        reference.connection.helped("raise", error)
    return cast(Iterator[Any], value)


def _items(items: list[Any], others: Any, _has_keys: bool) -> Iterator[Any]:
    yield from items
    if others is not None:
        yield from others


def _reversed(one: Remote) -> Any:
    value = plain_or_same(one)
    return reversed([*one] if isinstance(value, Remote) else value)


def _contains(one: Remote, item: Any) -> bool:
    reference = reference_of(one)
    value = reference.value()
    if not isinstance(value, Remote):
        return item in value
    if _is_trusted(reference) or isinstance(plain_or_same(item), Remote):
        return reference.helped("operator.contains", item) is True
    if reference.items() is None and reference.helped("batch") is not None:
        reference.connection.fail(_FORGED)
    return any(item is each or item == each for each in _iterated(one))


def _item(one: Remote, key: Any) -> Any:
    reference = reference_of(one)
    value = reference.value()
    if isinstance(value, dict) and reference.kind == "like" and key not in value:
        return reference.connection.helped(
            "operator.getitem", one, key
        )  # its class may have __missing__
    if not isinstance(value, Remote):
        return value[plain_or_same(key)]
    item = reference.helped("operator.getitem", key)
    if _is_trusted(reference):
        return item
    batch = reference.items()
    if batch is None:
        return item
    items, others, has_keys = batch
    if has_keys:
        is_there = key in items
    elif not isinstance(key, (int, slice)):
        is_there = True
    else:
        is_there = others is not None or _is_same(items[key], item)
    if not is_there:
        reference.connection.fail("an object of the program has another item than it iterates")
    return item


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Remote) or isinstance(other, Remote):
        return plain_or_same(one) is plain_or_same(other)
    return bool(one == other)


def install() -> None:
    """Gives `Remote` its operators."""
    for name in _COMPARISONS.split():
        setattr(Remote, f"__{name}__", _compared(name))
    for name in f"{_ARITHMETIC} divmod".split():
        setattr(Remote, f"__{name}__", _computed(name))
        setattr(Remote, f"__r{name}__", _computed(name, is_reflected=True))
    for path in _UNARY:
        setattr(Remote, f"__{path.partition('.')[2]}__", _unary(path))
    others = {"bool": _truth, "len": _length, "iter": _iterated, "reversed": _reversed}
    for name, function in {**others, "contains": _contains, "getitem": _item}.items():
        setattr(Remote, f"__{name}__", function)
