"""The sections of a config's input: which class reads each, and which keys no class reads.

pydantic reports an unknown key as one problem of one class. Here all of them are found at once,
with their path from the top of the input and the place that each belongs to.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from nemo_rl_core.config.annotations import (
    TAGS,
    annotated,
    class_that_reads,
    classes_of,
    item_annotations,
    tag_of,
    with_default_tag,
)
from nemo_rl_core.config.names import closest_name, name_hint
from nemo_rl_core.config.peer_names import peer_hint

Path = tuple[str | int, ...]
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
    found = [tag for kind in section.variants if key in kind.model_fields and (tag := tag_of(kind))]
    if not found:
        return None
    return f"{key!r} belongs to {found[0][0]} {_either([value for _, value in found])}"


def _homes(key: str, top: type[BaseModel], values: Mapping[str, Any]) -> str | None:
    """The places of the input that take a key, or would if they were there."""
    if key in TAGS:
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


def _given(
    kind: type[BaseModel],
    values: Mapping[str, Any],
    path: Path = (),
    variants: tuple[type[BaseModel], ...] = (),
) -> Iterator[Section]:
    """The sections of the input, outer ones first."""
    yield Section(path, kind, tuple(values), variants)
    # A shorthand, such as a preset, may choose another variant than the default one.
    is_plain = not values.keys() & getattr(kind, "shorthands", frozenset())
    for name, field in kind.model_fields.items():
        if name in values:
            value = with_default_tag(field, values[name]) if is_plain else values[name]
            yield from _below(annotated(field), value, (*path, name))


def _below(annotation: Any, value: Any, path: Path) -> Iterator[Section]:
    if isinstance(value, Mapping):
        chosen = class_that_reads(annotation, value)
        if chosen is not None:
            others = tuple(kind for kind in classes_of(annotation) if kind is not chosen)
            yield from _given(chosen, value, path, others)
            return
    for item_annotation in item_annotations(annotation, type(value)):
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
        annotation = annotated(field)
        chosen: type[BaseModel] | None = None
        if isinstance(inner, BaseModel):
            chosen = type(inner)
        elif isinstance(inner, Mapping):
            chosen = class_that_reads(annotation, inner)
        elif inner is None and len(classes_of(annotation)) == 1:
            (chosen,), inner = classes_of(annotation), {}
        if chosen is not None:
            yield from _accepted(chosen, inner, (*path, name))


def _default(field: FieldInfo) -> Any:
    if field.is_required():
        return None
    return field.get_default(call_default_factory=True, validated_data={})
