"""Assigns settings that are given only by name to their sections."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.functions import as_mapping
from nemo_rl_core.config.names import unknown_names
from nemo_rl_core.config.trainer import algorithm_of
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.trainers.fit.peer_arguments import python_hint
from nemo_rl_core.trainers.fit.peer_calls import Hint


def nested_overrides(
    settings_class: type[FrozenConfig], section: str, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the overrides in the sections that they belong to.

    A name is looked up in the settings themselves, then in the algorithm's section, then in the
    other sections. Unknown names are left out: `refuse_unclaimed` checks for them after the trainer
    has handled its own names. A full section is a mapping or a config, and its settings that are
    also given by name override it.
    """
    sections = _sections(settings_class)
    values: dict[str, Any] = {section: {}} if section in sections else {}
    for name, value in overrides.items():
        if name in settings_class.model_fields:
            values[name] = as_mapping(value)
    for name, value in overrides.items():
        owner = None if name in values else _owner(name, sections, section)
        if owner is not None:
            values[owner] = {**values.get(owner, {}), name: value}
    return values


def refuse_unclaimed(
    settings_class: type[FrozenConfig],
    section: str,
    config: Mapping[str, Any],
    overrides: Mapping[str, Any],
) -> None:
    """Refuses names that no part of a config has; names the one that was probably meant.

    `config` has sections and settings as nested mappings, and is validated against `settings_class`
    later.
    """
    claimed = {
        *config,
        *(key for part in config.values() if isinstance(part, dict) for key in part),
    }
    sections = _sections(settings_class).values()
    choices = {*claimed, *settings_class.model_fields}
    choices |= {key for kind in sections for key in kind.accepted_keys()}
    unknown = [name for name in overrides if name not in claimed]
    if unknown:
        raise unknown_names(
            "there is no setting",
            unknown,
            sorted(choices),
            otherwise="leave it out",
            elsewhere=lambda name: hint_of(settings_class, section)(name, overrides[name]),
        )


def hint_of(settings_class: type[FrozenConfig], section: str) -> Hint:
    """Returns a function that suggests what to write for a setting of another framework."""
    sections = _sections(settings_class)
    names = {*settings_class.model_fields}.union(*(s.accepted_keys() for s in sections.values()))
    fields = {*settings_class.model_fields}
    declared = algorithm_of(settings_class, section)
    return partial(
        python_hint,
        section=section,
        names=names,
        sections=fields,
        has_scalar_head=declared is not None and (declared.has_critic or declared.has_scalar_head),
    )


def _sections(settings_class: type[FrozenConfig]) -> dict[str, type[FrozenConfig]]:
    """Returns the class of each section that names are looked up in.

    For the engine, which has several kinds, it is the class of the default.
    """
    fields = settings_class.model_fields
    sections = {
        name: field.annotation
        for name, field in fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, FrozenConfig)
    }
    if "generation" in fields:
        sections["generation"] = type(fields["generation"].default)
    return sections


def _owner(name: str, sections: Mapping[str, type[FrozenConfig]], preferred: str) -> str | None:
    owners = [
        key
        for key, kind in sections.items()
        if name in kind.accepted_keys() or name in kind.renamed
    ]
    if preferred in owners:
        return preferred
    if len(owners) > 1:
        raise ConfigError(
            f"the setting {name!r} is in several sections",
            expected=f"one of {', '.join(f'{owner}={{{name!r}: ...}}' for owner in owners)}",
            got=name,
        )
    return owners[0] if owners else None
