"""Base class of all configs, which are frozen and refuse unknown keys."""

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
from pydantic_core import PydanticCustomError, PydanticKnownError, core_schema

from nemo_rl_core.config.annotations import has_default_tag, with_default_tag
from nemo_rl_core.config.mistakes import (
    CONTRADICTION,
    FIX,
    Mistake,
    follows,
    listed_mistakes,
    mistakes_of,
    placed,
)
from nemo_rl_core.config.places import PlacedDict, overlaid, place_of, without_keys
from nemo_rl_core.config.sections import (
    UnknownKey,
    accepted_keys,
    unknown_keys,
    without,
)
from nemo_rl_core.config.url_secrets import secret_fields
from nemo_rl_core.deprecations import warn_renamed
from nemo_rl_core.documented_names import documented
from nemo_rl_core.errors import ConfigError


def fields_of(schema: Any) -> dict[str, Any]:
    """Returns the schemas of a config's fields by name, from the core schema of its class."""
    while schema["type"] not in {"model-fields", "definition-ref"}:
        schema = schema["schema"]
    return dict(schema.get("fields", {}))


def refuse_conversions(fields: Mapping[str, Any]) -> None:
    """Changes schemas of fields so that numbers and booleans refuse values of other types.

    pydantic reads `true` as 1 and the text "3" as 3, which hides mistakes: `max_grad_norm: yes`
    would be 1.0. An integer for a real number, and 2.0 for an integer, are allowed.
    """
    for field in fields.values():
        _refuse_below(field["schema"])


def _refuse_below(schema: Any) -> None:
    kind = schema["type"]
    if kind in {"float", "bool"}:
        schema["strict"] = True
    elif kind == "int":
        # Strict integers would refuse 2.0, which a few formats write for 2.
        checked = core_schema.no_info_before_validator_function(_integer, {**schema})
        schema.clear()
        schema.update(checked)
    elif kind == "union":
        for choice in schema["choices"]:
            _refuse_below(choice[0] if isinstance(choice, tuple) else choice)
    elif kind == "tuple":
        for item in schema["items_schema"]:
            _refuse_below(item)
    # The schema of another config was already changed.
    elif kind != "model" and schema.get("function", {}).get("function") is not _integer:
        for key in ("schema", "items_schema", "keys_schema", "values_schema"):
            if key in schema:
                _refuse_below(schema[key])


def _integer(value: Any) -> Any:
    if isinstance(value, bool | str | bytes):
        raise PydanticKnownError("int_type")
    return value


_MAX_LISTED_WITH_HINT = 16
Bound = Annotated[float, Field(gt=0, allow_inf_nan=True)]
"""A positive number, or infinity (`.inf` in YAML) for no bound."""

_collects: ContextVar[bool] = ContextVar("_collects", default=False)


@contextmanager
def collecting_contradictions() -> Iterator[None]:
    """Collects `ConfigError`s of sections as mistakes of one error; else the first is raised."""
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
    """A config that cannot be changed after loading and refuses unknown keys.

    Raises:
        ConfigError: If there are unknown keys; names all of them, and other mistakes.
    """

    shorthands: ClassVar[frozenset[str]] = frozenset()
    """Accepted keys that are not fields; a validator turns them into fields."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """New names of fields by their old names, which are read with a warning."""
    secrets_from: ClassVar[str] = (
        "set it in the environment: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for an object "
        "store, or a variable that your code reads"
    )
    """How to provide a secret outside of an address, as the end of a fix."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        # Fields for which infinity has a meaning allow it themselves.
        allow_inf_nan=False,
        ser_json_inf_nan="constants",
    )

    @classmethod
    def accepted_keys(cls) -> set[str]:
        """Returns the accepted keys: fields and shorthands."""
        return accepted_keys(cls)

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_unknown_keys(cls, values: Any, handler: ValidatorFunctionWrapHandler) -> Self:
        if isinstance(values, dict):
            values = _with_new_names(cls, values)
        # The class that finds an unknown key raises; each outer class then checks all of its
        # input, so that the outermost class reports every mistake with its full path.
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
            # After validators of the class, which may merge the input into a preset. For a nested
            # class this runs again, with the schema of the first time.
            info, with_default = cls.model_fields[name], field["schema"]
            if has_default_tag(info) and not _sets_default_tag(with_default["schema"]):
                with_default["schema"] = core_schema.no_info_before_validator_function(
                    partial(with_default_tag, info), with_default["schema"]
                )
        # Around all validators of the class, whatever their mode.
        return core_schema.no_info_wrap_validator_function(_collected, schema)

    def replace(self, **changes: Any) -> Self:
        """Returns a validated copy with some fields changed."""
        return type(self).model_validate({**self.model_dump(), **changes})


def _with_new_names(kind: type[FrozenConfig], values: dict[str, Any]) -> dict[str, Any]:
    for old in kind.renamed.keys() & values.keys():
        new, location = kind.renamed[old], place_of(values, (old,))
        if new in values:
            raise ConfigError(
                f"{location + ': ' if location else ''}{old!r} is the former name of {new!r}",
                expected=f"one of the two (a base recipe may have set {new!r})",
                got=f"{old!r} and {new!r}",
                fix=f"remove {old!r} and write its value as {new!r}",
            )
        warn_renamed(old, new, location)
        renamed = PlacedDict({new: values[old]}, {new: location} if location else {})
        values = overlaid(without_keys(values, {old}), renamed)
    return values


def kind_or(
    default: str, key: str = "kind", *, known: Collection[str] = (), otherwise: str = ""
) -> Discriminator:
    """Discriminates a union's variants by `key`.

    Args:
        default: The variant of a map without the key.
        key: The key whose value names the variant.
        known: Names of the variants, in a union that has a variant for all other names.
        otherwise: The tag of that variant; empty in a union without it.
    """

    def kind_of(value: Any) -> str:
        kind = value.get(key, default) if isinstance(value, dict) else getattr(value, key, default)
        return otherwise if otherwise and kind not in known else str(kind)

    return Discriminator(kind_of)


def refuse_unknown_keys(
    kind: type[FrozenConfig], values: Mapping[str, Any], validate: Callable[[Any], Any]
) -> None:
    """Refuses keys that no class reads, at any depth; reports other mistakes with them."""
    unknown = unknown_keys(kind, values)
    if not unknown:
        return
    others: list[Mistake] = []
    try:
        validate(without(values, unknown))
    except ValidationError as error:
        # A contradiction may be caused by the default of a misspelled key.
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
    listed = key.hint is None or len(key.choices) <= _MAX_LISTED_WITH_HINT
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
