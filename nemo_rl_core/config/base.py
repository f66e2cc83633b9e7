"""The base of every config: frozen, and closed to unknown keys."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

from nemo_rl_core.config.annotations import has_default_tag, with_default_tag
from nemo_rl_core.config.kept_types import fields_of, refuse_conversions
from nemo_rl_core.config.mistakes import (
    CONTRADICTION,
    FIX,
    Mistake,
    follows,
    listed_mistakes,
    mistakes_of,
    placed,
)
from nemo_rl_core.config.sections import (
    UnknownKey,
    accepted_keys,
    unknown_keys,
    without,
)
from nemo_rl_core.config.url_secrets import secret_fields
from nemo_rl_core.documented_names import documented
from nemo_rl_core.errors import ConfigError

_MAX_BESIDE_HINT = 16
Bound = Annotated[float, Field(gt=0, allow_inf_nan=True)]
"""A positive number, or infinity for no bound: `.inf` in YAML."""

_collects: ContextVar[bool] = ContextVar("_collects", default=False)


@contextmanager
def collecting_contradictions() -> Iterator[None]:
    """Within it, a `ConfigError` of a section is one mistake among others of a `ValidationError`.

    Outside of it, the first one ends the validation.
    """
    token = _collects.set(True)
    try:
        yield
    finally:
        _collects.reset(token)


class UnknownKeyError(ConfigError):
    """The input of a config has keys that no class reads."""


def _collected(values: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    try:
        return handler(values)
    except UnknownKeyError:
        raise
    except ConfigError as error:
        if not _collects.get():
            raise
        raise PydanticCustomError(CONTRADICTION, "contradiction", {"error": error}) from error


def _sets_default_tag(schema: Any) -> bool:
    function = schema.get("function", {}).get("function")
    return isinstance(function, partial) and function.func is with_default_tag


class FrozenConfig(BaseModel):
    """A config that cannot be changed after loading and refuses keys it does not know.

    Raises:
        ConfigError: On unknown keys, of which it names all, and other mistakes beside them.
    """

    shorthands: ClassVar[frozenset[str]] = frozenset()
    """Keys that input may have besides the fields, and that a validator turns into fields."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Fields by the names that they had; the error of an old name says the new one."""
    secrets_from: ClassVar[str] = (
        "set it in the environment: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for an object "
        "store, or a variable that your code reads"
    )
    """How a secret is given that is not in an address, as the end of a fix."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        # A field for which infinity has a meaning allows it by itself.
        allow_inf_nan=False,
        ser_json_inf_nan="constants",
    )

    @classmethod
    def accepted_keys(cls) -> set[str]:
        """The keys that input may have: fields and shorthands."""
        return accepted_keys(cls)

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_unknown_keys(cls, values: Any, handler: ValidatorFunctionWrapHandler) -> Self:
        # The class that finds an unknown key raises; each class around it then looks through all
        # of its own input, so that the outermost names every mistake with its whole path.
        try:
            if isinstance(values, dict) and not values.keys() <= cls.accepted_keys():
                refuse_unknown_keys(cls, values, handler)
            validated: Self = handler(values)
        except UnknownKeyError:
            if isinstance(values, dict):
                refuse_unknown_keys(cls, values, handler)
            raise
        return validated

    @model_validator(mode="after")
    def _refuse_secrets_in_addresses(self) -> Self:
        secrets = [
            each
            for name, value in self
            if not isinstance(value, FrozenConfig)
            for each in secret_fields(value, name)
        ]
        if secrets:
            raise ConfigError(
                f"{', '.join(path for path, _ in secrets)}: an address with a secret",
                expected="an address without a user, a password or a key, since recipes are "
                "recorded in manifests, model cards and the history",
                got=", ".join(text[:200] for _, text in secrets),
                fix=f"remove the secret from the address; {self.secrets_from}",
            )
        return self

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        schema = handler(source)
        fields = fields_of(schema)
        refuse_conversions(fields)
        for name, field in fields.items():
            # After validators of the class, which may merge the input into a preset. A class within
            # another one comes here again, with the schema of the first time.
            info, with_default = cls.model_fields[name], field["schema"]
            if has_default_tag(info) and not _sets_default_tag(with_default["schema"]):
                with_default["schema"] = core_schema.no_info_before_validator_function(
                    partial(with_default_tag, info), with_default["schema"]
                )
        # Around all validators of the class, whatever their mode.
        return core_schema.no_info_wrap_validator_function(_collected, schema)

    def replace(self, **changes: Any) -> Self:
        """A validated copy with some fields changed."""
        return type(self).model_validate({**self.model_dump(), **changes})


def kind_or(
    unsaid: str, key: str = "kind", *, known: Collection[str] = (), otherwise: str = ""
) -> Discriminator:
    """Discriminates a union's variants by `key`; a map without that key is the variant `unsaid`.

    Args:
        unsaid: The variant of a map without the key.
        key: Whose value names the variant.
        known: The variants by name, in a union that has one for all other names.
        otherwise: The tag of that one; empty in a union without it.
    """

    def kind_of(value: Any) -> str:
        said = value.get(key, unsaid) if isinstance(value, dict) else getattr(value, key, unsaid)
        return otherwise if otherwise and said not in known else str(said)

    return Discriminator(kind_of)


def refuse_unknown_keys(
    kind: type[FrozenConfig], values: Mapping[str, Any], validate: Callable[[Any], Any]
) -> None:
    """Refuses keys that no class reads, at any depth, and names other mistakes with them.

    Args:
        kind: The class that reads `values`.
        values: Nested mappings and lists, as from a YAML file.
        validate: Validates a mapping, here the values without the unknown keys.

    Raises:
        UnknownKeyError: If there is any such key.
    """
    unknown = unknown_keys(kind, values)
    if not unknown:
        return
    others: list[Mistake] = []
    try:
        validate(without(values, unknown))
    except ValidationError as error:
        # A contradiction may be with the default of a key that is misspelt.
        others = [
            each
            for each in mistakes_of(error, values)
            if each.error is None and not follows(each, unknown)
        ]
    except ConfigError:
        pass  # a contradiction
    if len(unknown) > 1 or others:
        lines = [
            f"{placed(values, each.path)}{each.dotted}: unknown key; {_hint(each)}"
            for each in unknown
        ]
        raise UnknownKeyError(listed_mistakes([*lines, *(each.line for each in others)]), fix=FIX)
    (key,) = unknown
    # Dozens of keys would hide the hint.
    listed = key.hint is None or len(key.choices) <= _MAX_BESIDE_HINT
    raise UnknownKeyError(
        f"{placed(values, key.path)}unknown key {key.dotted!r}",
        expected=f"one of {', '.join(key.choices)}" if listed else None,
        got=str(key.path[-1]),
        fix=key.hint or "remove it",
    )


def _hint(key: UnknownKey) -> str:
    return key.hint or f"one of {', '.join(key.choices)}"


def __getattr__(name: str) -> Any:
    return documented(__name__, name)
