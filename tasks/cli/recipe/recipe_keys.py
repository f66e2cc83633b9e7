"""The sections of recipes as tables of keys by their path, read from the config classes.

What a key means stands in the `Attributes:` of a class's docstring, or of one that it inherits
from, or in the field's description.
"""

import functools
import importlib
import inspect
import pkgutil
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import tasks.recipes
from nemo_rl_core.algorithms.declarations import ALGORITHMS
from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.defaults import DefaultsContext, defaults_of_pretrained
from nemo_rl_core.config.names import unknown_names
from tasks.recipes.common import Recipe

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


_HEADING = re.compile(r"^(?:Attributes|Args|Example|Examples|Raises|Returns):$", re.MULTILINE)


@dataclass(frozen=True)
class Key:
    """One key of a recipe.

    Attributes:
        path: Path of the key, such as `grpo.loss.clip_low`; `[]` means each item of a list.
        type_name: The type as text.
        default: The default as YAML.
        unit: Unit of a number; empty if there is none.
        meaning: From the docstring; empty where there is none.
        variants: The classes of a section, none for a plain value.
    """

    path: str
    type_name: str
    default: str
    unit: str
    meaning: str
    variants: tuple[type[BaseModel], ...] = ()


@dataclass(frozen=True)
class Table:
    """The keys of one variant of a section, or those that all variants have.

    Attributes:
        path: Path of the section.
        tag: The key and the value that choose the variant, if there are several.
        about: The class's docstring without its sections.
        keys: In the order of the class.
    """

    path: str
    tag: tuple[str, str] | None
    about: str
    keys: tuple[Key, ...]


def about(kind: type[BaseModel]) -> str:
    """The prose of a class's docstring, without its sections such as `Attributes:`."""
    text = inspect.cleandoc(kind.__dict__.get("__doc__") or "")
    return _HEADING.split(text, maxsplit=1)[0].strip()


def meaning(kind: type[BaseModel], name: str) -> str:
    """Returns the meaning of a key on one line; empty if no docstring has it."""
    for each in kind.__mro__:
        if issubclass(each, BaseModel) and name in _attributes(each):
            return _attributes(each)[name]
    field = kind.model_fields.get(name)
    return (field.description if field is not None else None) or ""


@functools.cache
def _attributes(kind: type[BaseModel]) -> Mapping[str, str]:
    text = inspect.cleandoc(kind.__dict__.get("__doc__") or "")
    section = re.search(r"^Attributes:\n((?:    .*\n|\n)*)", text + "\n", re.MULTILINE)
    listed = re.split(r"^    (?=\S)", section[1], flags=re.MULTILINE) if section else []
    described = [each.partition(":") for each in listed if each.strip()]
    return {name: " ".join(description.split()) for name, _, description in described}


def tables(path: str, kinds: tuple[type[BaseModel], ...]) -> list[Table]:
    """The tables of one section: of one class, or what its variants share and then each variant.

    Args:
        path: Path of the section.
        kinds: Its variants.
    """
    if len(kinds) == 1:
        prose = [about(kind) for kind in _line(kinds[0])]
        return [Table(path, None, "\n\n".join(filter(None, prose)), _keys(path, kinds[0]))]
    each = [Table(path, tag(kind), about(kind), _keys(path, kind)) for kind in kinds]
    shared = [key for key in each[0].keys if all(key in table.keys for table in each)]
    common = Table(path, None, "", tuple(shared))
    variants = [
        Table(path, t.tag, t.about, tuple(key for key in t.keys if key not in shared)) for t in each
    ]
    return [common, *variants]


def _line(kind: type[BaseModel]) -> Sequence[type[BaseModel]]:
    """A class and those that it extends, up to the base of all configs."""
    line = [each for each in kind.__mro__ if issubclass(each, FrozenConfig)]
    return line[: line.index(FrozenConfig)]


def _keys(path: str, kind: type[BaseModel]) -> tuple[Key, ...]:
    return tuple(keys_of(kind, f"{path}."))


def keys_of(kind: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """The keys that a class takes, what only names the variant left out.

    Args:
        kind: A class of a recipe.
        prefix: Stands before each path.
    """
    named = tag(kind)
    for name in sorted(getattr(kind, "shorthands", ())):
        yield Key(prefix + name, "string", "`null`", "", meaning(kind, name))
    for name, field in kind.model_fields.items():
        if named is None or name != named[0]:
            yield _key(prefix, kind, name, field)


def _key(prefix: str, kind: type[BaseModel], name: str, field: FieldInfo) -> Key:
    return Key(
        path=prefix + name,
        type_name=type_text(field.annotation, field.metadata),
        default=default(field),
        unit=unit(name),
        meaning=meaning(kind, name),
        variants=tuple(dict.fromkeys(variants(field.annotation))),
    )


def pretrained_defaults() -> dict[str, object]:
    """Defaults by key that a pretrained model has, where they differ from those of the classes."""
    filled: dict[str, object] = {}
    for algorithm in ALGORITHMS.values():
        filled |= defaults_of_pretrained(
            {}, algorithm=algorithm, samples=True, context=DefaultsContext()
        )
    # Of a machine without GPUs; a recipe of any machine records `auto`.
    del filled["dtype"]
    return filled | {"model.dtype": "auto"}


Kinds = tuple[type[BaseModel], ...]


def recipe_classes() -> Kinds:
    """Returns the class of every recipe."""
    for module in pkgutil.iter_modules(tasks.recipes.__path__):
        importlib.import_module(f"tasks.recipes.{module.name}")
    return tuple(_below(Recipe))


def top_keys() -> list[Key]:
    """Returns the keys at the top of recipes, each once."""
    keys = {key.path: key for kind in recipe_classes() for key in keys_of(kind)}
    return sorted(keys.values(), key=lambda key: key.path)


def keys_at(path: str) -> list[tuple[str, list[Key]]]:
    """Returns the keys of a section, or a single key.

    Returns:
        Pairs of a heading and keys: first those that all variants of the section have, with the
        empty heading, then those of each variant, such as `kind: clipped`.

    Raises:
        ConfigError: If no recipe has the path.
    """
    kinds, key = recipe_classes(), None
    names = path.split(".")
    for index, name in enumerate(names):
        keys = [each for kind in kinds for each in keys_of(kind)]
        by_name = {each.path: each for each in keys}
        if name not in by_name:
            where = f" in {'.'.join(names[:index])}" if index else ""
            raise unknown_names(
                f"there is no key{where}",
                [name],
                sorted(by_name),
                otherwise="`nemo-rl keys SECTION` lists the keys",
            )
        key = by_name[name]
        kinds = tuple(
            dict.fromkeys(kind for each in keys if each.path == name for kind in each.variants)
        )
    assert key is not None, "a path has at least one name"
    if not kinds:
        return [("", [replace(key, path=path)])]
    shown = [(": ".join(table.tag or ()), [*table.keys]) for table in tables(path, kinds)]
    return [(heading, keys) for heading, keys in shown if keys or heading]


def completions(incomplete: str) -> list[str]:
    """Returns the keys that begin with a text; those of sections end with a dot."""
    section, _, _ = incomplete.rpartition(".")
    keys = [key for _, keys in keys_at(section) for key in keys] if section else top_keys()
    words = [key.path + ("." if key.variants else "=") for key in keys]
    return sorted({word for word in words if word.startswith(incomplete)})


def _below(kind: type[Recipe]) -> Iterator[type[Recipe]]:
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)
