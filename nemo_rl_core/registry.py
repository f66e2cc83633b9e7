"""Names for classes: built-in ones are imported only when asked for."""

import importlib
from collections.abc import Callable
from importlib import metadata
from typing import Generic, TypeVar

from nemo_rl_core.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """A table from names to classes.

    Args:
        kind: What the classes are, such as "training backend", for messages.
        builtin: Name to `module:class`; the module is imported on first use, so that a registry
            costs nothing to import.
        group: Of entry points: installed packages add names by theirs.
    """

    def __init__(self, kind: str, builtin: dict[str, str], *, group: str | None = None) -> None:
        self._kind = kind
        self._builtin = builtin
        self._group = group
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
            ConfigError: If there is none, or its package cannot be imported; lists the choices.
        """
        if name in self._registered:
            return self._registered[name]
        if name in self._builtin:
            module, _, attribute = self._builtin[name].partition(":")
            found: type[T] = getattr(importlib.import_module(module), attribute)
            return found
        installed = self._installed()
        if name in installed:
            return self._loaded(installed[name])
        choices = ", ".join(sorted({*self._builtin, *self._registered, *installed}))
        raise ConfigError(
            f"there is no {self._kind} {name!r}", expected=choices or self._where(), got=name
        )

    def reference(self, name: str) -> str | None:
        """`module:name` of what is called `name`, without importing it; None where there is none.

        A registered class counts before an entry point, as in `get`.
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
        # Named fault boundary: an installed package may raise anything while it is imported.
        except Exception as error:
            raise ConfigError(
                f"the {self._kind} {entry.name!r} cannot be loaded",
                expected=f"{entry.value}, as its package says",
                got=f"{type(error).__name__}: {str(error)[:160]}",
                fix="install the package again, or mend it",
            ) from error
        return loaded

    def _where(self) -> str:
        group = f", or an entry point of the group {self._group!r}" if self._group else ""
        return f"a registered {self._kind}{group}"
