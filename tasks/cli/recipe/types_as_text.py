"""Types, bounds, defaults and units of config fields, as a reader of a recipe would write them."""

import re
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

_PLAIN = {bool: "boolean", int: "integer", float: "number", str: "string", Any: "any JSON value"}
_BOUNDS = (
    (annotated_types.Gt, "gt", "> {}"),
    (annotated_types.Ge, "ge", "≥ {}"),
    (annotated_types.Lt, "lt", "< {}"),
    (annotated_types.Le, "le", "≤ {}"),
)
_UNITS = (
    (r"_seconds$", "s"),
    (r"_gib$", "GiB"),
    (r"_mib$", "MiB"),
    (r"(^|_)tokens(_per_\w+)?$|^max_model_len$", "tokens"),
    (r"_characters$", "characters"),
    (r"_turns$", "turns"),
    (r"^\w+_every_num_steps$", "steps"),
    (r"_batch_size$", "sequences"),
    (r"_parallel_size$", "ranks"),
    (r"_fraction$|^min_success_ratio$", "fraction"),
    (r"^(max_)?(calls|draws|moves)$", "\\2"),
    (r"^max_staleness$", "updates"),
    (r"^rows_per_call$|^num_(train|validation)$", "rows"),
    (r"^num_parallel$", "completions"),
)


def variants(annotation: Any) -> list[type[BaseModel]]:
    """The config classes that an annotation names, in order: of a union, a list or a mapping."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [kind for part in get_args(annotation) for kind in variants(part)]


def tag(kind: type[BaseModel]) -> tuple[str, str] | None:
    """The field that names a variant, and its only value: `("kind", "clipped")`."""
    for name in ("kind", "backend", "place"):
        field = kind.model_fields.get(name)
        values = get_args(field.annotation) if field is not None else ()
        if len(values) == 1:
            return name, str(values[0])
        if field is not None and name == "backend":
            return name, "NAME"
    return None


def unit(name: str) -> str:
    """Returns the unit of a field from its name; empty for plain numbers and other types."""
    for pattern, words in _UNITS:
        if match := re.search(pattern, name):
            return match.expand(words)
    counted = re.match(r"num_(?:\w*_)??([a-z]+(?:_per_\w+)?)$", name)
    return counted[1].replace("_", " ") if counted else ""


def default(field: FieldInfo) -> str:
    """A field's default as YAML in code font, or that it has none."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    return f"`{_as_yaml(value)}`"


def _as_yaml(value: Any) -> str:
    if isinstance(value, BaseModel):
        named = tag(type(value))
        changed = value.model_dump(mode="json", exclude_defaults=True)
        value = {**(dict([named]) if named else {}), **changed}
    if isinstance(value, list):
        return f"[{', '.join(_as_yaml(each) for each in value)}]"
    if isinstance(value, float):
        return f"{value:g}"
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")


def type_text(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type as text, in code font: ``integer ≥ 1, or `null` ``.

    Args:
        annotation: Annotation of a pydantic field.
        metadata: Constraints of the field.
    """
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return type_text(inner, [*metadata, *more])
    if get_origin(annotation) in (Union, types.UnionType):
        return _union(get_args(annotation), metadata)
    if get_origin(annotation) is Literal:
        return " \\| ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) in (list, dict):
        words = "list of " if get_origin(annotation) is list else "map from "
        items = " to ".join(type_text(item) for item in get_args(annotation))
        return f"{_filled(metadata)}{words}{items}"
    if annotation in _PLAIN:
        filled = _filled(metadata) if annotation is str else ""
        return " ".join([filled + _PLAIN[annotation], *_bounds(metadata)])
    assert variants(annotation), f"there are no words for the type {annotation!r}"
    return "section"


def _union(members: Sequence[Any], metadata: Sequence[Any]) -> str:
    values = [member for member in members if member is not type(None)]
    texts = list(dict.fromkeys(type_text(value, metadata) for value in values))
    if len(members) > len(values):
        texts.append("`null`")
    return " or ".join(texts)


def _filled(metadata: Sequence[Any]) -> str:
    shortest = [getattr(each, "min_length", None) for each in _flat(metadata)]
    return "non-empty " if any(shortest) else ""


def _bounds(metadata: Sequence[Any]) -> list[str]:
    limits = [
        words.format(f"{getattr(each, name):g}")
        for bound, name, words in _BOUNDS
        for each in _flat(metadata)
        if isinstance(each, bound)
    ]
    patterns = [f"matching `{p}`" for each in _flat(metadata) if (p := _pattern(each))]
    return [", ".join(limits + patterns)] if limits or patterns else []


def _pattern(constraint: Any) -> str | None:
    pattern: str | None = getattr(constraint, "pattern", None)
    return pattern


def _flat(metadata: Sequence[Any]) -> Iterator[Any]:
    """Constraints one by one: pydantic's `Field` and `Interval` hold several."""
    for each in metadata:
        if isinstance(each, FieldInfo):
            yield from _flat(each.metadata)
        elif isinstance(each, annotated_types.GroupedMetadata):
            yield from _flat(list(each))
        else:
            yield each
