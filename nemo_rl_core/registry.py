"""Registries of classes by name; built-in ones are imported on first use."""

import importlib
from collections.abc import Callable
from importlib import metadata
from typing import Generic, TypeVar

from nemo_rl_core.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """A mapping from names to classes.

    Args:
        kind: Kind of the classes for messages, such as "training backend".
        builtin: `module:class` by name; the module is imported on first use.
        group: Group of entry points with which installed packages add names.
    """

    def __init__(self, kind: str, builtin: dict[str, str], *, group: str | None = None) -> None:
        self._kind = kind
        self._builtin = builtin
        self._group = group
        self._registered: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Returns a class decorator that adds a class under `name`."""

        def add(cls: type[T]) -> type[T]:
            self[name] = cls
            return cls

        return add

    def __setitem__(self, name: str, cls: type[T]) -> None:
        self._registered[name] = cls

    def get(self, name: str) -> type[T]:
        """Returns the class with this name.

        Raises:
            ConfigError: If there is none, or its package cannot be imported; lists the choices.
        """
        if name in self._registered:
            return self._registered[name]
        if name in self._builtin:
            module, _, attribute = self._builtin[name].partition(":")
            cls: type[T] = getattr(importlib.import_module(module), attribute)
            return cls
        installed = self._installed()
        if name in installed:
            return self._loaded(installed[name])
        choices = ", ".join(sorted({*self._builtin, *self._registered, *installed}))
        group = f", or an entry point of the group {self._group!r}" if self._group else ""
        raise ConfigError(
            f"there is no {self._kind} {name!r}",
            expected=choices or f"a registered {self._kind}{group}",
            got=name,
        )

    def reference(self, name: str) -> str | None:
        """Returns `module:class` of a name without importing it; None if there is none.

        A registered class takes precedence over an entry point, as in `get`.
        """
        if name in self._registered:
            cls = self._registered[name]
            return f"{cls.__module__}:{cls.__qualname__}"
        entry = self._installed().get(name)
        return self._builtin.get(name) or (entry.value if entry else None)

    def _installed(self) -> dict[str, metadata.EntryPoint]:
        if self._group is None:
            return {}
        return {entry.name: entry for entry in metadata.entry_points(group=self._group)}

    def _loaded(self, entry: metadata.EntryPoint) -> type[T]:
        try:
            loaded: type[T] = entry.load()
        # Broad on purpose: an installed package may raise anything while it is imported.
        except Exception as error:
            raise ConfigError(
                f"the {self._kind} {entry.name!r} cannot be loaded",
                expected=f"{entry.value}, as its package declares",
                got=f"{type(error).__name__}: {str(error)[:160]}",
                fix="install the package again, or fix it",
            ) from error
        return loaded
