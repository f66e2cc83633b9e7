"""Conversion of flytekit's literals, promises and Python values into plain values."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import reduce
from operator import getitem
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgpack
from flytekit.core.promise import Promise
from flytekit.models.literals import Literal, Scalar
from pydantic import BaseModel

from nemo_rl_core.errors import StoreError
from nemo_rl_core.history.inserts import as_value
from nemo_rl_core.history.records import Value
from nemo_rl_core.store.manifest import Manifest
from tasks.artifacts import Artifact


def plain(value: Any) -> Any:
    """Converts an input or output of a node into JSON values."""
    match value:
        case Promise():
            return reduce(getitem, value.attr_path, plain(value.val))
        case Literal():
            return _plain_literal(value)
        case BaseModel():
            return value.model_dump(mode="json")
        case list() | tuple():
            return [plain(each) for each in value]
        case dict():
            return {str(key): plain(each) for key, each in value.items()}
    return value


def _plain_literal(literal: Literal) -> Any:
    if literal.collection is not None:
        return [_plain_literal(each) for each in literal.collection.literals]
    if literal.map is not None:
        return {key: _plain_literal(each) for key, each in literal.map.literals.items()}
    return _plain_scalar(literal.scalar) if literal.scalar is not None else None


def _plain_scalar(scalar: Scalar) -> Any:
    if scalar.none_type is not None:
        return None
    if scalar.union is not None:
        return _plain_literal(scalar.union.value)
    if scalar.primitive is not None:
        return scalar.primitive.value
    if scalar.binary is not None:
        return msgpack.loads(scalar.binary.value, strict_map_key=False)
    # Files and frames, which no stage of this project returns directly.
    return str(getattr(scalar.value, "uri", scalar.value))


def artifact_id(value: Any) -> str | None:
    """Returns the id of the artifact that a plain value describes, or None for other values.

    An artifact's id is its manifest's name, independent of its folder's name.
    """
    if not isinstance(value, dict) or not isinstance(value.get("directory"), dict):
        return None
    folder = Path(str(value["directory"].get("path")))
    with suppress(StoreError):
        return Manifest.read(folder).name or folder.name
    return folder.name


def described_values(values: Mapping[str, Any], types: Mapping[str, Any]) -> list[Value]:
    """Returns the recorded form of a node's inputs or outputs."""
    described = []
    for name, value in values.items():
        shown = plain(value)
        described.append(as_value(name, type_name(types.get(name)), shown, artifact_id(shown)))
    return described


def type_name(kind: Any) -> str:
    """Returns the name of a type, without annotations for the cache.

    Example:
        >>> type_name(list[Annotated[int, object()]] | None)
        'list[int] | None'
    """
    arguments, origin = get_args(kind), get_origin(kind)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin in (Union, UnionType):
        return " | ".join(type_name(each) for each in arguments)
    if kind in (None, NoneType):
        return "None"
    if isinstance(origin, type) and all(
        isinstance(each, type) or get_args(each) for each in arguments
    ):
        return f"{origin.__name__}[{', '.join(type_name(each) for each in arguments)}]"
    if isinstance(kind, type):
        return kind.__name__
    return str(kind).replace("typing.", "")


def named_outputs(names: list[str], returned: Any) -> dict[str, Promise]:
    """Returns the promises that a task or workflow returned, by output name."""
    if not names:
        return {}
    promises = returned if isinstance(returned, tuple) else (returned,)
    return dict(zip(names, promises, strict=True))


def promises_in(value: Any) -> Iterator[Any]:
    """Yields the promises, artifacts and configs in a value; lists and dictionaries may nest."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from promises_in(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from promises_in(each)
    elif isinstance(value, Promise | Artifact | BaseModel):
        yield value
