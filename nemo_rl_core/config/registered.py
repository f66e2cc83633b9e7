"""Config sections of registered backends; reading a config does not import the backends."""

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
"""Tag of the variant for all registered names."""


class RegisteredBackend(FrozenConfig):
    """The section of a backend that is not built in.

    Attributes:
        backend: The name that the backend is registered under.
        module: The Python module that registers it, in the current directory or installed; it is
            imported when the recipe is read. None if it is imported already, or an installed
            package declares it by an entry point.
        source: A digest of the module's source, which is part of the cache key. A run fills it in.
    """

    backend: str
    module: str | None = None
    source: str = ""

    @classmethod
    def sections(cls) -> "SectionTable[Any]":
        """Returns the table in which the section's backend is looked up."""
        raise NotImplementedError

    @classmethod
    def class_for(cls, values: Mapping[str, Any]) -> type[FrozenConfig] | None:
        """Returns the class that reads a section; None if its backend is unknown."""
        if not cls._is_generic():
            return cls
        try:
            return cls.sections().find(str(values.get("backend")), values.get("module"))
        except ValueError:
            return None  # the validation of the section raises the error

    @classmethod
    def unknown_key_hint(cls) -> str | None:
        """Returns the fix for a key that this class does not have."""
        if not cls._is_generic():
            return None
        return (
            "a backend that is registered without a config has no custom settings: pass a subclass "
            f"of {cls.__name__} with these fields to {cls.sections().decorator}(name, config=...)"
        )

    @classmethod
    def _is_generic(cls) -> bool:
        """Whether this is the base class, which represents any registered backend."""
        return cls is cls.sections().base

    @model_validator(mode="wrap")
    @classmethod
    def _read_by_its_own_class(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Self:
        if not (isinstance(value, dict) and cls._is_generic()):
            validated: Self = handler(value)
            return validated
        name, table = str(value.get("backend")), cls.sections()
        kind = table.find(name, value.get("module"))
        section = {"module": table.module_of(name), **value}
        if kind is not cls:
            return kind.model_validate(section)  # type: ignore[no-any-return]
        plain: Self = handler(section)
        return plain


C = TypeVar("C", bound=RegisteredBackend)


class SectionTable(Generic[C]):
    """The registered backends of one kind, with the class of each section.

    Args:
        kind: Kind of backend for messages, such as "training backend".
        decorator: Name of the decorator that registers a backend, for messages.
    """

    def __init__(self, kind: str, base: type[C], builtin: tuple[str, ...], decorator: str) -> None:
        self.base, self.decorator = base, decorator
        self._kind, self._builtin = kind, builtin
        self._group = f"nemo_rl_core.{kind.replace(' ', '_')}s"
        self._classes: dict[str, tuple[type[C], str | None]] = {}

    def add(self, name: str, config: type[C] | None, module: str) -> None:
        """Adds a backend, whose section has no custom settings if `config` is None."""
        if config is not None and name in self._builtin:
            raise ConfigError(
                f"{name!r} is a built-in {self._kind}, which has a config",
                expected="another name",
                got=name,
                fix="register the backend under another name",
            )
        if config is not None and not issubclass(config, self.base):
            raise ConfigError(
                f"the config of the {self._kind} {name!r} has the wrong base class",
                expected=f"a subclass of {self.base.__module__}.{self.base.__name__}",
                got=config.__name__,
                fix=f"let {config.__name__} extend {self.base.__name__}, before its other bases",
            )
        if name not in self._builtin:  # built-in sections do not change
            self._classes[name] = (config or self.base, None if module == "__main__" else module)

    def find(self, name: str, module: str | None) -> type[C]:
        """Returns the class that reads a backend's section; a `ValueError` if there is none."""
        if name not in self._classes:
            self._import(name, module)
        if name not in self._classes:
            raise ValueError(self._unknown(name, module))
        return self._classes[name][0]

    def module_of(self, name: str) -> str | None:
        """Returns the module that defines a known backend; None if only this process has it."""
        return self._classes[name][1]

    def _import(self, name: str, module: str | None) -> None:
        if module is not None:
            import_user_module(module)
            return
        for entry in metadata.entry_points(group=self._group, name=name):
            entry.load()  # registers it

    def _unknown(self, name: str, module: str | None) -> str:
        names = sorted({*self._builtin, *self._classes})
        meant = closest_name(name, names)
        if meant is not None:
            return f"there is no {self._kind} {name!r}: did you mean {meant!r}?"
        problem = f"there is no {self._kind} {name!r} among {', '.join(names)}: "
        if module is not None:
            return problem + f"the module {module!r} does not register it (@{self.decorator})"
        return problem + f"name the module that registers it, {{backend: {name}, module: ...}}"


def import_user_module(name: str) -> None:
    """Imports a user-defined module, also from the current directory; else a `ValueError`."""
    # At the end, so that a file in the current directory cannot replace an installed package.
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    importlib.invalidate_caches()
    try:
        importlib.import_module(name)
    # Broad on purpose: a user's module may raise anything, and exit, while it is imported.
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"the module {name!r} cannot be imported ({type(error).__name__}: "
            f"{str(error)[:160]}): it must be {name.replace('.', '/')}.py in the current "
            "directory, or installed"
        ) from error


def user_search_path(section: FrozenConfig) -> dict[str, str]:
    """Returns the environment in which workers can import a registered backend's module."""
    if not isinstance(section, RegisteredBackend):
        return {}
    return {"PYTHONPATH": os.pathsep.join(str(Path(each).absolute()) for each in sys.path)}
