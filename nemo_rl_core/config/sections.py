"""The sections of a config's input: which class reads each, and which keys no class reads.

pydantic reports an unknown key as one problem of one class. Here all of them are found at once,
with their path from the top of the input and the place that each belongs to.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Final, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, Discriminator, Tag
from pydantic.fields import FieldInfo

from nemo_rl_core.config.names import closest_name, name_hint
from nemo_rl_core.config.peer_names import peer_hint

Path = tuple[str | int, ...]

_TAGS: Final = ("kind", "backend")
_MAX_HOMES: Final = 4


class Section(NamedTuple):
    """A mapping of the input, or the place of one that is left out.

    Attributes:
        path: From the top of the input.
        kind: The class that reads it.
        keys: Of the input.
        variants: The classes that other tags would choose.
    """

    path: Path
    kind: type[BaseModel]
    keys: tuple[Any, ...] = ()
    variants: tuple[type[BaseModel], ...] = ()


@dataclass(frozen=True)
class UnknownKey:
    """A key of the input that no class reads.

    Attributes:
        path: From the top of the input, the key last.
        choices: The keys that may stand there.
        hint: The key or the place that is meant; None where none is clearly meant.
        meant: The key at the same place that is meant, if any.
    """

    path: Path
    choices: tuple[str, ...]
    hint: str | None
    meant: str | None

    @property
    def dotted(self) -> str:
        """The path as users write it."""
        return dotted(self.path)


def dotted(path: Path) -> str:
    """A path as text: `("parts", 0, "weight")` is `parts.0.weight`."""
    return ".".join(map(str, path))


def accepted_keys(kind: type[BaseModel]) -> set[str]:
    """The keys that a class takes: its fields and shorthands."""
    return {*kind.model_fields, *getattr(kind, "shorthands", ())}


def unknown_keys(kind: type[BaseModel], values: Mapping[str, Any]) -> list[UnknownKey]:
    """Every key below `values` that no class reads.

    Args:
        kind: The class that reads `values`.
        values: Nested mappings and lists, as from a YAML file.
    """
    return [
        _explained(key, section, kind, values)
        for section in _given(kind, values)
        for key in section.keys
        if key not in accepted_keys(section.kind)
    ]


def without(values: Mapping[str, Any], unknown: list[UnknownKey]) -> dict[str, Any]:
    """A copy of `values` that lacks the unknown keys."""

    def kept(value: Any, path: Path) -> Any:
        if isinstance(value, Mapping):
            items = ((key, (*path, key)) for key in value)
            return {key: kept(value[key], at) for key, at in items if at not in refused}
        if isinstance(value, list):
            return [kept(item, (*path, place)) for place, item in enumerate(value)]
        return value

    refused = {each.path for each in unknown}
    found: dict[str, Any] = kept(values, ())
    return found


def _explained(
    given: Any, section: Section, top: type[BaseModel], values: Mapping[str, Any]
) -> UnknownKey:
    choices = tuple(sorted(accepted_keys(section.kind)))
    path, key = (*section.path, given), str(given)
    renamed: Mapping[str, str] = getattr(section.kind, "renamed", {})
    meant = renamed.get(key) or closest_name(key, choices)
    own_hint = getattr(section.kind, "unknown_key_hint", lambda: None)()
    places = [_of_variants(key, section), _homes(key, top, values), own_hint]
    facts = [place for place in places if place]
    # A name that is right elsewhere is no misspelling.
    if not facts and key not in renamed and (hint := peer_hint(key)):
        return UnknownKey(path, choices, hint, None)
    if not facts or key in renamed:
        return UnknownKey(path, choices, name_hint(key, choices, renamed), meant)
    # A key of another place is no misspelling; a guess at this place could be wrong.
    facts += [f"here there is {meant!r}"] if meant else []
    return UnknownKey(path, choices, "; ".join(facts), meant)


def _of_variants(key: str, section: Section) -> str | None:
    """The variants of the section that take a key, which the chosen one does not."""
    found = [tag for kind in section.variants if key in kind.model_fields and (tag := _tag(kind))]
    if not found:
        return None
    return f"{key!r} belongs to {found[0][0]} {_either([value for _, value in found])}"


def _homes(key: str, top: type[BaseModel], values: Mapping[str, Any]) -> str | None:
    """The places of the input that take a key, or would if they were there."""
    if key in _TAGS:
        return None
    homes = [dotted(s.path) for s in _accepted(top, values) if key in s.kind.model_fields]
    if not homes or len(homes) > _MAX_HOMES:
        return None
    if homes == [""]:
        return f"{key!r} belongs at the top"
    return f"{key!r} belongs to {_either([home or 'the top' for home in homes])}"


def _either(names: list[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def _tag(kind: type[BaseModel]) -> tuple[str, str] | None:
    """The field that names a variant, and its only value."""
    for name in _TAGS:
        values = get_args(kind.model_fields[name].annotation) if name in kind.model_fields else ()
        if len(values) == 1:
            return name, str(values[0])
    return None


def _given(
    kind: type[BaseModel],
    values: Mapping[str, Any],
    path: Path = (),
    variants: tuple[type[BaseModel], ...] = (),
) -> Iterator[Section]:
    """The sections of the input, outer ones first."""
    yield Section(path, kind, tuple(values), variants)
    for name, field in kind.model_fields.items():
        if name in values:
            yield from _below(_annotated(field), values[name], (*path, name))


def _below(annotation: Any, value: Any, path: Path) -> Iterator[Section]:
    if isinstance(value, Mapping):
        chosen = _chosen(annotation, value)
        if chosen is not None:
            others = tuple(kind for kind in _classes(annotation) if kind is not chosen)
            yield from _given(chosen, value, path, others)
            return
    for item_annotation in _items(annotation, type(value)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for place, item in items:
            yield from _below(item_annotation, item, (*path, place))


def _accepted(kind: type[BaseModel], values: Any, path: Path = ()) -> Iterator[Section]:
    """Every section that the input has or may have, lists left out."""
    yield Section(path, kind)
    for name, field in kind.model_fields.items():
        if isinstance(values, BaseModel):
            inner = getattr(values, name)
        else:
            inner = values[name] if name in values else _default(field)
        annotation = _annotated(field)
        chosen: type[BaseModel] | None = None
        if isinstance(inner, BaseModel):
            chosen = type(inner)
        elif isinstance(inner, Mapping):
            chosen = _chosen(annotation, inner)
        elif inner is None and len(_classes(annotation)) == 1:
            (chosen,), inner = _classes(annotation), {}
        if chosen is not None:
            yield from _accepted(chosen, inner, (*path, name))


def _default(field: FieldInfo) -> Any:
    if field.is_required():
        return None
    return field.get_default(call_default_factory=True, validated_data={})


def _annotated(field: FieldInfo) -> Any:
    """The annotation with what says how its union is discriminated."""
    return Annotated[field.annotation, field, *field.metadata]


def _classes(annotation: Any) -> list[type[BaseModel]]:
    """The config classes that a value may be an instance of, those of a list's items left out."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is Annotated:
        return _classes(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for member in get_args(annotation) for kind in _classes(member)]
    return []


def _chosen(
    annotation: Any, value: Mapping[str, Any], by: str | Discriminator | None = None
) -> type[BaseModel] | None:
    """The class that reads a mapping; None where no class does, or the tag is wrong."""
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        return _chosen(inner, value, _discriminator(metadata) or by)
    if get_origin(annotation) not in (Union, UnionType):
        found = next(iter(_classes(annotation)), None)
        # A class may stand for others, which are registered under names.
        class_for = getattr(found, "class_for", None)
        return class_for(value) if class_for else found
    members = [member for member in get_args(annotation) if _classes(member)]
    if by is not None and len(members) > 1:
        members = [member for member in members if _has_tag(member, by, value)]
    return _chosen(members[0], value) if len(members) == 1 else None


def _discriminator(metadata: list[Any]) -> str | Discriminator | None:
    for each in metadata:
        if isinstance(each, Discriminator):
            return each
        if isinstance(each, FieldInfo) and each.discriminator is not None:
            return each.discriminator
    return None


def _has_tag(member: Any, by: str | Discriminator, value: Mapping[str, Any]) -> bool:
    if isinstance(by, str):
        (kind,) = _classes(member)
        return value.get(by) in get_args(kind.model_fields[by].annotation)
    assert callable(by.discriminator)
    tags = [each.tag for each in get_args(member)[1:] if isinstance(each, Tag)]
    return by.discriminator(value) in tags


def _items(annotation: Any, container: type) -> Iterator[Any]:
    """What the items of a list or the values of a mapping are, as often as a union says it."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _items(get_args(annotation)[0], container)
    elif origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from _items(member, container)
    elif isinstance(origin, type) and issubclass(container, origin) and origin is not type:
        yield get_args(annotation)[-1]
