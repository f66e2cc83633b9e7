"""Names for classes: built-in ones are imported only when asked for."""

import importlib
from collections.abc import Callable
from typing import Generic, TypeVar

from nemo_rl_core.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """A table from names to classes.

    Args:
        kind: What the classes are, such as "training backend", for messages.
        builtin: Name to `module:class`; the module is imported on first use, so that a registry
            costs nothing to import.
    """

    def __init__(self, kind: str, builtin: dict[str, str]) -> None:
        self._kind = kind
        self._builtin = builtin
        self._registered: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """A class decorator that adds a class under `name`."""

        def add(cls: type[T]) -> type[T]:
            self[name] = cls
            return cls

        return add

    def __setitem__(self, name: str, cls: type[T]) -> None:
        self._registered[name] = cls

    def get(self, name: str) -> type[T]:
        """The class called `name`.

        Raises:
            ConfigError: If there is none; lists the choices.
        """
        if name in self._registered:
            return self._registered[name]
        if name in self._builtin:
            module, _, attribute = self._builtin[name].partition(":")
            found: type[T] = getattr(importlib.import_module(module), attribute)
            return found
        choices = ", ".join(sorted({*self._builtin, *self._registered}))
        raise ConfigError(f"there is no {self._kind} {name!r}", expected=choices, got=name)
