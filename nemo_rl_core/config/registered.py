"""Sections of backends that users register: base classes, and the tables of the registered ones.

The tables lie here, below the backends, because a config is read where no backend is imported.
"""

import importlib
import os
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from pydantic import ValidatorFunctionWrapHandler, model_validator

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.names import closest_name
from nemo_rl_core.errors import ConfigError

REGISTERED = "registered"
"""The tag of the variant that stands for every registered name."""


class RegisteredBackend(FrozenConfig):
    """The section of a backend that is not built in.

    Attributes:
        backend: The name that the backend is registered under.
        module: The Python module that registers it, in the current directory or installed; it is
            imported when the recipe is read. None where it is imported already, or an installed
            package announces it by an entry point.
        source: A digest of the module's source, which is part of the cache key. A run fills it in.
    """

    backend: str
    module: str | None = None
    source: str = ""

    @classmethod
    def sections(cls) -> "SectionTable[Any]":
        """The table that names of this section are looked up in."""
        raise NotImplementedError

    @classmethod
    def class_for(cls, values: Mapping[str, Any]) -> type[FrozenConfig] | None:
        """The class that reads a section; None where its backend is not known.

        Args:
            values: The section as a mapping.
        """
        if not cls._is_open():
            return cls
        try:
            return cls.sections().find(str(values.get("backend")), values.get("module"))
        except ValueError:
            return None  # the validation of the section raises the error

    @classmethod
    def unknown_key_hint(cls) -> str | None:
        """The fix for a key that this class does not have."""
        if not cls._is_open():
            return None
        return (
            "a backend that is registered without a config takes no settings of its own: "
            f"{cls.sections().decorator}(name, config=...) names a subclass of {cls.__name__} "
            "that has them"
        )

    @classmethod
    def _is_open(cls) -> bool:
        """Whether the class stands for all registered backends."""
        return cls is cls.sections().base

    @model_validator(mode="wrap")
    @classmethod
    def _read_by_its_own_class(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Self:
        if not (isinstance(value, dict) and cls._is_open()):
            validated: Self = handler(value)
            return validated
        name, table = str(value.get("backend")), cls.sections()
        kind = table.find(name, value.get("module"))
        given = {"module": table.module_of(name), **value}
        if kind is not cls:
            return kind.model_validate(given)  # type: ignore[no-any-return]
        plain: Self = handler(given)
        return plain


C = TypeVar("C", bound=RegisteredBackend)


class SectionTable(Generic[C]):
    """The registered backends of one kind, with the class of each section.

    Args:
        kind: Such as "training backend", for messages.
        base: The class that configs extend.
        builtin: The names that are taken.
        decorator: What registers a backend, for messages.
    """

    def __init__(self, kind: str, base: type[C], builtin: tuple[str, ...], decorator: str) -> None:
        self.base, self.decorator = base, decorator
        self._kind, self._builtin = kind, builtin
        self._group = f"nemo_rl_core.{kind.replace(' ', '_')}s"
        self._classes: dict[str, tuple[type[C], str | None]] = {}

    def add(self, name: str, config: type[C] | None, module: str) -> None:
        """Adds a backend.

        Args:
            name: As a section's `backend` has it.
            config: The class of the section; None for one without settings of its own.
            module: That defines the backend.

        Raises:
            ConfigError: If `config` does not extend the base, or the name is that of a built-in
                backend.
        """
        if config is not None and name in self._builtin:
            raise ConfigError(
                f"{name!r} is a built-in {self._kind}, which has a config",
                expected="another name",
                got=name,
                fix="register the backend under a name of its own",
            )
        if config is not None and not issubclass(config, self.base):
            raise ConfigError(
                f"the config of the {self._kind} {name!r} is of another kind",
                expected=f"a subclass of {self.base.__module__}.{self.base.__name__}",
                got=config.__name__,
                fix=f"let {config.__name__} extend {self.base.__name__}, before its other bases",
            )
        if name not in self._builtin:  # whose sections stay as they are
            self._classes[name] = (config or self.base, None if module == "__main__" else module)

    def find(self, name: str, module: str | None) -> type[C]:
        """The class that reads the section of a backend.

        Args:
            name: Of the backend.
            module: Imported if the name is not known.

        Raises:
            ValueError: If the module cannot be imported, or nothing registers the name.
        """
        if name not in self._classes:
            self._import(name, module)
        if name not in self._classes:
            raise ValueError(self._unknown(name, module))
        return self._classes[name][0]

    def module_of(self, name: str) -> str | None:
        """The module that defines a known backend; None if only this process has it."""
        return self._classes[name][1]

    def _import(self, name: str, module: str | None) -> None:
        if module is not None:
            import_user_module(module)
            return
        for entry in metadata.entry_points(group=self._group, name=name):
            entry.load()  # which registers it

    def _unknown(self, name: str, module: str | None) -> str:
        names = sorted({*self._builtin, *self._classes})
        meant = closest_name(name, names)
        if meant is not None:
            return f"there is no {self._kind} {name!r}: did you mean {meant!r}?"
        there = f"there is no {self._kind} {name!r} among {', '.join(names)}: "
        if module is not None:
            return there + f"the module {module!r} does not register it (@{self.decorator})"
        return there + f"name the module that registers it, {{backend: {name}, module: ...}}"


def import_user_module(name: str) -> None:
    """Imports a module of the user's; those of the current directory count.

    Raises:
        ValueError: If that fails.
    """
    # At the end, so that a file of the user's cannot stand in for an installed package.
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    importlib.invalidate_caches()
    try:
        importlib.import_module(name)
    # Named fault boundary: a user's module may raise anything, and exit, while it is imported.
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"the module {name!r} cannot be imported ({type(error).__name__}: "
            f"{str(error)[:160]}): it must be {name.replace('.', '/')}.py in the current "
            "directory, or installed"
        ) from error


def user_search_path(section: FrozenConfig) -> dict[str, str]:
    """The environment in which workers find a registered backend's module as this process does.

    Args:
        section: Of a backend; for a built-in one there is nothing to set.
    """
    if not isinstance(section, RegisteredBackend):
        return {}
    return {"PYTHONPATH": os.pathsep.join(str(Path(each).absolute()) for each in sys.path)}
