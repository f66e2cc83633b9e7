"""Finds the config classes that can read a field's value, by the field's annotation."""

from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin

from pydantic import BaseModel, Discriminator, Tag
from pydantic.fields import FieldInfo

from nemo_rl_core.config.places import overlaid

TAGS: Final = ("kind", "backend", "place")


def tag_of(kind: type[BaseModel]) -> tuple[str, str] | None:
    """Returns the name of the field that identifies a variant, and its only value."""
    for name in TAGS:
        values = get_args(kind.model_fields[name].annotation) if name in kind.model_fields else ()
        if len(values) == 1:
            return name, str(values[0])
    return None


def annotated(field: FieldInfo) -> Any:
    """Returns a field's annotation with the discriminator of its union."""
    return Annotated[field.annotation, field, *field.metadata]


def classes_of(annotation: Any) -> list[type[BaseModel]]:
    """Returns the config classes of an annotation, without those of list items."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is Annotated:
        return classes_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for member in get_args(annotation) for kind in classes_of(member)]
    return []


def has_default_tag(field: FieldInfo) -> bool:
    """Whether the default of a field determines the variant of its union."""
    is_union = isinstance(_discriminator([field, *field.metadata]), str)
    return is_union and isinstance(field.default, BaseModel)


def with_default_tag(field: FieldInfo, value: Any) -> Any:
    """Adds the tag of the field's default to a mapping without a tag; keeps other values."""
    if not isinstance(value, Mapping) or not has_default_tag(field):
        return value
    tag = tag_of(type(field.default))
    return value if tag is None or tag[0] in value else overlaid({tag[0]: tag[1]}, value)


def class_that_reads(
    annotation: Any, value: Mapping[str, Any], by: str | Discriminator | None = None
) -> type[BaseModel] | None:
    """Returns the class that reads a mapping; None if there is none, or the tag is wrong."""
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        return class_that_reads(inner, value, _discriminator(metadata) or by)
    if get_origin(annotation) not in (Union, UnionType):
        kind = next(iter(classes_of(annotation)), None)
        # A class may represent others, which are registered under names.
        class_for = getattr(kind, "class_for", None)
        return class_for(value) if class_for else kind
    members = [member for member in get_args(annotation) if classes_of(member)]
    if by is not None and len(members) > 1:
        members = [member for member in members if _has_tag(member, by, value)]
    return class_that_reads(members[0], value) if len(members) == 1 else None


def _discriminator(metadata: list[Any]) -> str | Discriminator | None:
    for each in metadata:
        if isinstance(each, Discriminator):
            return each
        if isinstance(each, FieldInfo) and each.discriminator is not None:
            return each.discriminator
    return None


def _has_tag(member: Any, by: str | Discriminator, value: Mapping[str, Any]) -> bool:
    if isinstance(by, str):
        (kind,) = classes_of(member)
        return value.get(by) in get_args(kind.model_fields[by].annotation)
    assert callable(by.discriminator)
    tags = [each.tag for each in get_args(member)[1:] if isinstance(each, Tag)]
    return by.discriminator(value) in tags


def item_annotations(annotation: Any, container: type) -> Iterator[Any]:
    """Yields the annotations of list items or mapping values, one per matching union member."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from item_annotations(get_args(annotation)[0], container)
    elif origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from item_annotations(member, container)
    elif isinstance(origin, type) and issubclass(container, origin) and origin is not type:
        yield get_args(annotation)[-1]
