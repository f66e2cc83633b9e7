"""Settings given by name alone, sorted into the sections they belong to."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.names import unknown_names
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.trainers.peer_arguments import python_hint
from nemo_rl_core.trainers.peer_calls import Hint


def nested_overrides(
    settings_class: type[FrozenConfig], section: str, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """What is named, in the sections that it belongs to.

    A name is looked for among the settings themselves, then in the algorithm's section, then in the
    other sections. A name that is nowhere is left out: `refuse_unclaimed` checks that, once a
    trainer has taken what it knows itself.

    Args:
        settings_class: Whose sections.
        section: Name of the algorithm's section, which wins over the others.
        overrides: Values by name; a whole section is a mapping or a config, over which settings of
            it that are named by themselves are laid.

    Raises:
        ConfigError: For a name that several other sections have.
    """
    sections = _sections(settings_class)
    values: dict[str, Any] = {section: {}} if section in sections else {}
    for name, value in overrides.items():
        if name in settings_class.model_fields:
            values[name] = _as_mapping(value)
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
    """Refuses names that have come to stand nowhere in a config.

    Args:
        settings_class: What the config is checked against later; its settings are the choices.
        section: Name of the algorithm's section.
        config: Sections and settings, as nested mappings.
        overrides: Values by name.

    Raises:
        ConfigError: For all such names; says the one that is meant, where that is clear.
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
            renamed={old: new for kind in sections for old, new in kind.renamed.items()},
            elsewhere=lambda name: hint_of(settings_class, section)(name, overrides[name]),
        )


def hint_of(settings_class: type[FrozenConfig], section: str) -> Hint:
    """What to write for a setting of another framework, for a trainer of these settings."""
    sections = _sections(settings_class)
    names = {*settings_class.model_fields}.union(*(s.accepted_keys() for s in sections.values()))
    whole = {*settings_class.model_fields}
    return lambda name, value: python_hint(
        name, value, section=section, names=names, sections=whole
    )


def _sections(settings_class: type[FrozenConfig]) -> dict[str, type[FrozenConfig]]:
    """The sections that names are looked for in, and what may be said in each.

    The engine is a section as well: of its kinds, the keys of the default are known.
    """
    fields = settings_class.model_fields
    found = {
        name: field.annotation
        for name, field in fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, FrozenConfig)
    }
    if "generation" in fields:
        found["generation"] = type(fields["generation"].default)
    return found


def _as_mapping(value: Any) -> Any:
    """A config or mapping as a mapping of its own, so that nothing of the caller's is changed."""
    if isinstance(value, BaseModel):
        return value.model_dump()
    return dict(value) if isinstance(value, Mapping) else value


def _owner(name: str, sections: Mapping[str, type[FrozenConfig]], first: str) -> str | None:
    owners = [key for key, kind in sections.items() if name in kind.accepted_keys()]
    if first in owners:
        return first
    if len(owners) > 1:
        raise ConfigError(
            f"the setting {name!r} stands in several sections",
            expected=f"one of {', '.join(f'{owner}={{{name!r}: ...}}' for owner in owners)}",
            got=name,
        )
    return owners[0] if owners else None
