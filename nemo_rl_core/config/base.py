"""The base of every config: frozen, closed to unknown keys, clear about mistakes."""

import difflib
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Discriminator, ValidationError, model_validator

from nemo_rl_core.errors import ConfigError

_NUM_SHOWN = 16


class FrozenConfig(BaseModel):
    """A config that cannot be changed after loading and refuses keys it does not know.

    Raises:
        ConfigError: On an unknown key (names the nearest valid one).
    """

    shorthands: ClassVar[frozenset[str]] = frozenset()
    """Keys that input may have besides the fields, and that a validator turns into fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @classmethod
    def accepted_keys(cls) -> set[str]:
        """The keys that input may have: fields and shorthands."""
        return {*cls.model_fields, *cls.shorthands}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, values: Any) -> Any:
        # A ConfigError is not a ValueError, so pydantic lets it through unwrapped: a misspelt key
        # is reported alone, not as one line among the errors of every member of a union.
        if isinstance(values, dict):
            for key in values:
                if key not in cls.model_fields:
                    raise _unknown_key(str(key), cls)
        return values

    def replace(self, **changes: Any) -> Self:
        """A validated copy with some fields changed."""
        return type(self).model_validate({**self.model_dump(), **changes})


def kind_or(unsaid: str, key: str = "kind") -> Discriminator:
    """Discriminates a union's variants by `key`; a map without that key is the variant `unsaid`."""

    def kind_of(value: Any) -> str:
        if isinstance(value, dict):
            return str(value.get(key, unsaid))
        return str(getattr(value, key, unsaid))

    return Discriminator(kind_of)


def _unknown_key(key: str, config: type[FrozenConfig]) -> ConfigError:
    choices = sorted(config.accepted_keys())
    nearest = difflib.get_close_matches(key, choices, n=1, cutoff=0.5)
    # A section with dozens of words would fill the screen: those most like the key are named.
    shown = sorted(difflib.get_close_matches(key, choices, n=_NUM_SHOWN, cutoff=0.0))
    more = ", …" if len(choices) > len(shown) else ""
    return ConfigError(
        f"unknown key {key!r} in {config.__name__}",
        expected=f"one of {', '.join(shown)}{more}",
        got=key,
        fix=f"did you mean {nearest[0]!r}?" if nearest else "remove it",
    )


def describe(error: ValidationError) -> ConfigError:
    """Turns pydantic's report into this project's form, first three problems only."""
    problems = error.errors(include_url=False)
    lines = [
        f"{'.'.join(str(part) for part in item['loc']) or 'config'}: {_said(item)}"
        for item in problems[:3]
    ]
    more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
    first = problems[0]
    return ConfigError(
        f"the configuration is not valid{more}:\n  " + "\n  ".join(lines),
        got=repr(first.get("input"))[:120],
        fix="change the named value in the recipe or in --config",
    )


def _said(problem: Mapping[str, Any]) -> str:
    if problem["type"] == "union_tag_not_found":
        return "must say of which kind it is, as in {kind: ...}"
    return str(problem["msg"]).removeprefix("Value error, ")
