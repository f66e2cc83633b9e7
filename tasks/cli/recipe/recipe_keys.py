"""The sections of recipes as tables of keys, read from the config classes.

What a key means stands in the `Attributes:` of a class's docstring, or of one that it inherits
from, or in the field's description.
"""

import functools
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from nemo_rl_core.algorithms.declarations import ALGORITHMS
from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.defaults import DefaultsContext, defaults_of_pretrained
from tasks.cli.recipe.types_as_text import default, tag, type_text, unit, variants

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
