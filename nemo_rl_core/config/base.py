"""The base of every config: frozen, closed to unknown keys, clear about mistakes."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any, ClassVar, NamedTuple, Self

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

from nemo_rl_core.config.places import place_of
from nemo_rl_core.config.sections import (
    Path,
    UnknownKey,
    accepted_keys,
    dotted,
    unknown_keys,
    without,
)
from nemo_rl_core.documented_names import documented
from nemo_rl_core.errors import ConfigError

_MAX_BESIDE_HINT = 16
Bound = Annotated[float, Field(gt=0, allow_inf_nan=True)]
"""A positive number, or infinity for no bound: `.inf` in YAML."""

_FIX = "change the named values in the recipe or in --config"
_CONTRADICTION = "contradiction"

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
        raise PydanticCustomError(_CONTRADICTION, "contradiction", {"error": error}) from error


class FrozenConfig(BaseModel):
    """A config that cannot be changed after loading and refuses keys it does not know.

    Raises:
        ConfigError: On unknown keys, of which it names all, and other mistakes beside them.
    """

    shorthands: ClassVar[frozenset[str]] = frozenset()
    """Keys that input may have besides the fields, and that a validator turns into fields."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Fields by the names that they had; the error of an old name says the new one."""

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

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        # Around all validators of the class, whatever their mode.
        return core_schema.no_info_wrap_validator_function(_collected, handler(source))

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
    others: list[_Mistake] = []
    try:
        validate(without(values, unknown))
    except ValidationError as error:
        # A contradiction may be with the default of a key that is misspelt.
        others = [
            each
            for each in _mistakes(error, values)
            if each.error is None and not _follows(each, unknown)
        ]
    except ConfigError:
        pass  # a contradiction
    if len(unknown) > 1 or others:
        lines = [
            f"{_placed(values, each.path)}{each.dotted}: unknown key; {_hint(each)}"
            for each in unknown
        ]
        raise UnknownKeyError(_listed([*lines, *(each.line for each in others)]), fix=_FIX)
    (key,) = unknown
    # Dozens of keys would hide the hint.
    listed = key.hint is None or len(key.choices) <= _MAX_BESIDE_HINT
    raise UnknownKeyError(
        f"{_placed(values, key.path)}unknown key {key.dotted!r}",
        expected=f"one of {', '.join(key.choices)}" if listed else None,
        got=str(key.path[-1]),
        fix=key.hint or "remove it",
    )


def _hint(key: UnknownKey) -> str:
    return key.hint or f"one of {', '.join(key.choices)}"


class _Mistake(NamedTuple):
    """One problem that pydantic found, at a path of the input.

    Attributes:
        path: From the top of the input.
        place: The file and line of it, and a colon; empty where it is not known.
        type: Pydantic's name of the problem.
        text: What is wrong.
        value: The input at the path.
        error: A contradiction that a section refused.
    """

    path: Path
    place: str
    type: str
    text: str
    value: Any
    error: ConfigError | None = None

    @property
    def line(self) -> str:
        if self.error is not None:
            return f"{self._where}{_in_one_line(self.error)}"
        plain = not isinstance(self.value, Mapping | list | BaseModel)
        got = f" (got {self.value!r:.60})" if plain and self.type != "missing" else ""
        return f"{self.place}{dotted(self.path) or 'config'}: {self.text}{got}"

    @property
    def alone(self) -> ConfigError:
        """The error of the only mistake."""
        if self.error is not None:
            _, *hints = self.error.args
            return type(self.error)(f"{self._where}{self.error.problem}", *hints)
        text = f"{self.place}{dotted(self.path) or 'config'}: {self.text}"
        return ConfigError(_listed([text]), got=repr(self.value)[:120], fix=_FIX)

    @property
    def _where(self) -> str:
        return f"{self.place}{dotted(self.path)}: " if self.place and self.path else self.place


def _in_one_line(error: ConfigError) -> str:
    hints = (("expected", error.expected), ("got", error.got), ("fix", error.fix))
    return "; ".join([error.problem, *(f"{word}: {text}" for word, text in hints if text)])


def _placed(values: Any, path: Path) -> str:
    place = place_of(values, path)
    return f"{place}: " if place else ""


def _follows(mistake: _Mistake, unknown: Sequence[UnknownKey]) -> bool:
    """Whether a mistake is there only because an unknown key was left out.

    Either a key is missing because it is misspelt, or a section is not what it would be with the
    key: it has a default in its place.
    """
    if mistake.type == "missing":
        return any(mistake.path == (*each.path[:-1], each.meant) for each in unknown)
    return any(each.path[: len(mistake.path)] == mistake.path for each in unknown)


def describe(error: ValidationError, values: Any) -> ConfigError:
    """Turns pydantic's report into this project's form.

    Args:
        error: Of the validation of `values`.
        values: The input, from which the paths of the problems are read.
    """
    mistakes = _mistakes(error, values)
    if len(mistakes) > 1:
        return ConfigError(_listed([each.line for each in mistakes]), fix=_FIX)
    return mistakes[0].alone


def _listed(lines: Sequence[str]) -> str:
    return "\n  ".join(["the configuration is not valid:", *lines])


def _mistakes(error: ValidationError, values: Any) -> list[_Mistake]:
    found = []
    for item in error.errors(include_url=False):
        path = _path(item["loc"], values, item["type"])
        contradiction = item["ctx"]["error"] if item["type"] == _CONTRADICTION else None
        place = _placed(values, path)
        found.append(
            _Mistake(path, place, item["type"], _text(item), item.get("input"), contradiction)
        )
    # The other members of a union did not fit either, but were not meant.
    refused = {each.path for each in found if each.error is not None and each.path}
    return [each for each in found if each.error is not None or each.path not in refused]


def _path(location: Path, values: Any, problem: str) -> Path:
    """A location without what pydantic adds to it: the tags and types of unions' members."""
    path: list[str | int] = []
    for part in location:
        is_place = isinstance(part, int) and isinstance(values, list | tuple)
        if is_place or (isinstance(values, Mapping) and part in values):
            path.append(part)
            values = values[part]
    return (*path, location[-1]) if problem == "missing" else tuple(path)


def _text(problem: Mapping[str, Any]) -> str:
    if problem["type"] == "union_tag_not_found":
        return "must say of which kind it is, as in {kind: ...}"
    return str(problem["msg"]).removeprefix("Value error, ")


def __getattr__(name: str) -> Any:
    return documented(__name__, name)
