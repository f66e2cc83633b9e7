"""Settings given by name alone, sorted into the sections they belong to."""

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from nemo_rl_core.config.base import FrozenConfig, describe
from nemo_rl_core.errors import ConfigError

S = TypeVar("S", bound=FrozenConfig)


def settings_from_overrides(
    settings_class: type[S], section: str, overrides: Mapping[str, Any]
) -> S:
    """Settings with everything at its default but what is named.

    A name is looked for among the settings themselves, then in the algorithm's section, then in the
    other sections.

    Args:
        settings_class: What to make.
        section: Name of the algorithm's section, which wins over the others.
        overrides: Values by name; a section's value is a mapping that is laid over its defaults.

    Raises:
        ConfigError: For a name that does not exist or that several other sections have, and for
            values that do not fit.
    """
    fields = settings_class.model_fields
    sections = {
        name: field.annotation
        for name, field in fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }
    values: dict[str, Any] = {section: {}} if section in sections else {}
    for name, value in overrides.items():
        if name in fields:
            laid_over = name in values and isinstance(value, Mapping)
            values[name] = {**values[name], **value} if laid_over else value
            continue
        owner = _owner(name, sections, section)
        values.setdefault(owner, {})[name] = value
    try:
        return settings_class.model_validate(values)
    except ValidationError as error:
        raise describe(error) from error


def _owner(name: str, sections: Mapping[str, Any], first: str) -> str:
    owners = [key for key, kind in sections.items() if name in kind.model_fields]
    if first in owners:
        return first
    if len(owners) == 1:
        return owners[0]
    if owners:
        raise ConfigError(
            f"the setting {name!r} stands in several sections",
            expected=f"one of {', '.join(f'{owner}={{{name!r}: ...}}' for owner in owners)}",
            got=name,
        )
    choices = sorted({*sections, *(key for kind in sections.values() for key in kind.model_fields)})
    nearest = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    raise ConfigError(
        f"there is no setting {name!r}",
        expected=f"one of {', '.join(choices)}",
        got=name,
        fix=f"did you mean {nearest[0]!r}?" if nearest else "leave it out",
    )
