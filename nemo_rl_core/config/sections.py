"""Finds the class that reads each section of a config's input, and keys that no class reads."""

from collections.abc import Collection, Iterator, Mapping
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
    """A section of the input, or one that is left out.

    Attributes:
        variants: The classes that other tags would select.
    """

    path: Path
    kind: type[BaseModel]
    keys: tuple[Any, ...] = ()
    variants: tuple[type[BaseModel], ...] = ()


@dataclass(frozen=True)
class UnknownKey:
    """A key of the input that no class reads.

    Attributes:
        hint: Sentence on the key or section that is meant; None if it is not clear.
        meant: The key of the same section that is meant, if any.
    """

    path: Path
    choices: tuple[str, ...]
    hint: str | None
    meant: str | None

    @property
    def dotted(self) -> str:
        """The path in dotted form."""
        return dotted(self.path)


def dotted(path: Path) -> str:
    """Formats a path as text: `("parts", 0, "weight")` is `parts.0.weight`."""
    return ".".join(map(str, path))


def accepted_keys(kind: type[BaseModel]) -> set[str]:
    """Returns the keys that a class accepts: its fields and shorthands."""
    return {*kind.model_fields, *getattr(kind, "shorthands", ())}


def unknown_keys(kind: type[BaseModel], values: Mapping[str, Any]) -> list[UnknownKey]:
    """Finds all keys of nested `values` that no class reads."""
    return [
        _explain(key, section, kind, values)
        for section in _sections(kind, values)
        for key in section.keys
        if key not in accepted_keys(section.kind) and key not in _old_names(section.kind)
    ]


def _old_names(kind: type[BaseModel]) -> Collection[str]:
    return getattr(kind, "renamed", {}).keys()


def without(values: Mapping[str, Any], unknown: list[UnknownKey]) -> dict[str, Any]:
    """Returns a copy of `values` without the unknown keys."""

    def kept(value: Any, path: Path) -> Any:
        if isinstance(value, Mapping):
            items = ((key, (*path, key)) for key in value)
            return {key: kept(value[key], at) for key, at in items if at not in refused}
        if isinstance(value, list):
            return [kept(item, (*path, index)) for index, item in enumerate(value)]
        return value

    refused = {each.path for each in unknown}
    result: dict[str, Any] = kept(values, ())
    return result


def _explain(
    unknown: Any, section: Section, top: type[BaseModel], values: Mapping[str, Any]
) -> UnknownKey:
    choices = tuple(sorted(accepted_keys(section.kind)))
    path, key = (*section.path, unknown), str(unknown)
    meant = closest_name(key, choices)
    class_hint = getattr(section.kind, "unknown_key_hint", lambda: None)()
    hints = [_variant_hint(key, section), _section_hint(key, top, values), class_hint]
    facts = [hint for hint in hints if hint]
    # A name of another framework is not a misspelling.
    if not facts and (hint := peer_hint(key)):
        return UnknownKey(path, choices, hint, None)
    if not facts:
        return UnknownKey(path, choices, name_hint(key, choices), meant)
    # A key of another section is not a misspelling; a suggestion here could be wrong.
    facts += [f"here there is {meant!r}"] if meant else []
    return UnknownKey(path, choices, "; ".join(facts), meant)


def _variant_hint(key: str, section: Section) -> str | None:
    tags = [tag for kind in section.variants if key in kind.model_fields and (tag := tag_of(kind))]
    if not tags:
        return None
    return f"{key!r} belongs to {tags[0][0]} {_either([value for _, value in tags])}"


def _section_hint(key: str, top: type[BaseModel], values: Mapping[str, Any]) -> str | None:
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


def _sections(
    kind: type[BaseModel],
    values: Mapping[str, Any],
    path: Path = (),
    variants: tuple[type[BaseModel], ...] = (),
) -> Iterator[Section]:
    yield Section(path, kind, tuple(values), variants)
    # A shorthand, such as a preset, may select another variant than the default.
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
            yield from _sections(chosen, value, path, others)
            return
    for item_annotation in item_annotations(annotation, type(value)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _below(item_annotation, item, (*path, key))


def _accepted(kind: type[BaseModel], values: Any, path: Path = ()) -> Iterator[Section]:
    """Yields every section that the input has or may have, except in lists."""
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
