"""Source digests of a user's objects: reward functions, environments, policies.

Importable objects count by the source of their module. Others (a cell of a notebook, a lambda, a
nested function) count by their compiled code, the values that they close over, and the globals
that they read, at any depth. So comments do not count, but a helper in another cell does.
"""

import copyreg
import dis
import functools
import hashlib
import operator
import os
import re
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple
from uuid import uuid4

from nemo_rl_core.store.source_digest import source_digest
from nemo_rl_core.store.source_files import OWN_PACKAGES
from nemo_rl_core.store.user_source import read_user_source

_READS = ("LOAD_GLOBAL", "LOAD_NAME")
_PLAIN = frozenset([type(None), bool, int, float, complex, str, bytes, type(Ellipsis)])
_IGNORED_ATTRIBUTES = frozenset(
    [
        *("__dict__", "__weakref__", "__doc__", "__module__", "__firstlineno__"),
        *("_abc_impl", "__orig_bases__", "__parameters__"),
        *("__pydantic_core_schema__", "__pydantic_serializer__", "__pydantic_validator__"),
    ]
)
"""Attributes of classes that are caches, such as those of an `ABC`, or derived from others."""
_WEAK = (weakref.ref, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
"""Caches, such as in `functools.singledispatch`; their contents belong to other objects."""
_SLOTS = (MemberDescriptorType, GetSetDescriptorType)
_INSTALLED = tuple(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib"))


class ObjectSource(NamedTuple):
    """The digest of an object, modules and files of its code, and types that cannot be compared.

    Objects with such an `unknown` type have a different digest in every process.
    """

    digest: str
    unknown: tuple[str, ...]
    code: frozenset[str]


def object_source(value: Any) -> ObjectSource:
    """Computes the digest of an object's code and of everything that it refers to.

    Example:
        >>> object_source(lambda text: len(text)) == object_source(lambda text: len(text))
        True
        >>> object_source(lambda text: len(text)) == object_source(lambda text: -len(text))
        False
    """
    walk = _Walk()
    walk.add(value)
    digest = hashlib.sha256("\n".join(walk.parts).encode(errors="backslashreplace")).hexdigest()
    return ObjectSource(digest[:16], tuple(dict.fromkeys(walk.unknown)), frozenset(walk.code))


class _Walk:
    def __init__(self) -> None:
        self.parts: list[str] = []
        self.unknown: list[str] = []
        self.code: set[str] = set()
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # ids stay unique while objects live

    def add(self, value: Any) -> None:
        if type(value) in _PLAIN or isinstance(value, PurePath):
            self.parts.append(f"{type(value).__name__} {value!r}")
            return
        if id(value) in self._seen:
            self.parts.append(f"again {self._seen[id(value)]}")
            return
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        self._add_new(value)

    def _add_new(self, value: Any) -> None:
        if type(value) in _CONTAINERS:
            _CONTAINERS[type(value)](self, value)
            return
        for kinds, add in _KINDS:
            if isinstance(value, kinds):
                add(self, value)
                return
        if hasattr(value, "__wrapped__"):  # functools.cache and wraps
            self.add(value.__wrapped__)
            return
        self._add_instance(value)

    def add_all(self, name: str, values: Iterable[Any]) -> None:
        items = list(values)
        self.parts.append(f"{name} {len(items)}")
        for each in items:
            self.add(each)

    def add_mapping(self, value: Mapping[Any, Any]) -> None:
        self.add_all("mapping", (part for pair in value.items() for part in pair))

    def add_set(self, value: Any) -> None:
        sources = [object_source(each) for each in value]
        self.parts.append("set " + " ".join(sorted(each.digest for each in sources)))
        for each in sources:
            self.unknown += each.unknown
            self.code |= each.code

    def add_function(self, function: FunctionType) -> None:
        self.code.add(function.__code__.co_filename)
        is_importable = self._add_module_of(function)
        # A module and a name do not identify a lambda or a nested function, so its code is added.
        if not is_importable or "<" in function.__qualname__:
            self.add_code(function.__code__, function.__doc__)
        if not is_importable:
            used_globals = {
                name: function.__globals__[name]
                for name in sorted(set(_globals_read(function.__code__)))
                if name in function.__globals__
            }
            self.add_mapping(used_globals)
        cells = [_content_of(each) for each in function.__closure__ or ()]
        self.add_all("closes over", cells)
        self.add_all("defaults", function.__defaults__ or ())
        self.add_mapping(function.__kwdefaults__ or {})

    def add_code(self, code: CodeType, doc: str | None = None) -> None:
        """Adds compiled code without line numbers; the docstring is its first constant."""
        constants = list(code.co_consts)
        if doc is not None and constants[:1] == [doc]:
            constants[0] = None
        self.parts.append(code.co_code.hex())
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        self.add_all("code", (*names, code.co_flags, code.co_exceptiontable, *constants))
        for module in _modules_imported(code):
            self.parts.append(f"import {module} {_source_of_module(module)}")

    def add_class(self, cls: type) -> None:
        if self._add_module_of(cls) and "<" not in cls.__qualname__:
            return
        self.add_all("bases", cls.__bases__)
        parts = {
            name: part
            for name, part in sorted(vars(cls).items())
            if name not in _IGNORED_ATTRIBUTES
        }
        self.add_mapping(parts)

    def add_module(self, module: ModuleType) -> None:
        self.parts.append(f"module {module.__name__} {_source_of_module(module.__name__)}")

    def add_method(self, method: MethodType) -> None:
        self.add_all("method", (method.__func__, method.__self__))

    def add_partial(self, partial: "functools.partial[Any]") -> None:
        self.add_all("partial", (partial.func, partial.args, partial.keywords))

    def add_property(self, value: property) -> None:
        self.add_all("property", (value.fget, value.fset, value.fdel))

    def _add_module_of(self, value: FunctionType | type) -> bool:
        """Adds the source of the module that defines it; False if it cannot be imported."""
        module = value.__module__ or "__main__"
        source = _source_of_module(module)
        if source:
            self.code.add(module)
            self.parts.append(f"{module}:{value.__qualname__} {source}")
        return bool(source)

    def _add_instance(self, value: Any) -> None:
        cls = type(value)
        if not _is_installed(cls.__module__):
            self.add_all("instance", (cls, object.__getstate__(value)))
            self.add_all("content", (kind(value) for kind in cls.__mro__ if kind in _VALUES))
            if not any(map(_has_hidden_state, cls.__mro__)):
                return
        if hasattr(value, "untyped_storage"):
            self._add_tensor(value)
            return
        try:
            reduce = copyreg.dispatch_table.get(cls, operator.methodcaller("__reduce_ex__", 4))
            reduced = reduce(value)
        # Broad on purpose: any object may refuse to be pickled, with any error.
        except Exception:  # noqa: BLE001
            self.unknown.append(f"{cls.__module__}.{cls.__qualname__}")
            self.parts.append(uuid4().hex)
            return
        parts = [reduced] if isinstance(reduced, str) else reduced
        self.add_all("made by", map(_comparable, parts))

    def _add_tensor(self, tensor: Any) -> None:
        """Adds a torch tensor, whose pickle contains addresses."""
        data = tensor.detach().cpu().contiguous().flatten().view(sys.modules["torch"].uint8)
        digest = hashlib.sha256(data.numpy().tobytes()).hexdigest()
        self.add_all("tensor", (str(tensor.dtype), tuple(tensor.shape), digest))


def _comparable(part: Any) -> Any:
    """Returns a part of a reduced object without iterators, addresses and hashes."""
    match part:
        case (None, {"cls_ref": _, **others}):
            return others
        case {"_original_object_hash": _, **others}:  # of transformers; differs by process
            return others
        case Iterator():
            return list(part)
        case _:
            return part


def _has_hidden_state(cls: type) -> bool:
    """Whether instances of an installed class have state besides attributes, like a deque."""
    is_other = cls is not object and cls not in _VALUES and _is_installed(cls.__module__)
    return is_other and not vars(cls).keys().isdisjoint(("__reduce__", "__reduce_ex__"))


def _is_installed(module: str) -> bool:
    if module.partition(".")[0] in sys.stdlib_module_names:
        return module != "__main__"
    file = getattr(sys.modules.get(module), "__file__", None)
    return bool(file) and any(Path(str(file)).is_relative_to(each) for each in _INSTALLED)


@functools.cache
def _source_of_module(module: str) -> str:
    """Returns a digest of a module's source or its package's version; empty if not importable."""
    top = module.partition(".")[0]
    if module == "__main__":
        return ""
    if top in sys.stdlib_module_names:
        return "python"
    if top not in OWN_PACKAGES and not read_user_source(module, without=OWN_PACKAGES).digest:
        return ""
    return source_digest(module)


def _globals_read(code: CodeType) -> Iterator[str]:
    for each in _codes(code):
        for instruction in dis.get_instructions(each):
            if instruction.opname in _READS:
                yield str(instruction.argval)


def _modules_imported(code: CodeType) -> list[str]:
    modules = {
        str(instruction.argval)
        for instruction in dis.get_instructions(code)
        if instruction.opname == "IMPORT_NAME" and instruction.argval
    }
    return sorted(modules)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _content_of(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


_CONTAINERS: dict[type, Callable[[_Walk, Any], None]] = {
    list: lambda walk, value: walk.add_all("list", value),
    tuple: lambda walk, value: walk.add_all("tuple", value),
    dict: _Walk.add_mapping,
    set: _Walk.add_set,
    frozenset: _Walk.add_set,
}
_VALUES = {*_CONTAINERS, int, float, complex, str, bytes}
"""Types whose subclasses have content besides their attributes."""
_KINDS: tuple[tuple[Any, Callable[[_Walk, Any], None]], ...] = (
    (CodeType, _Walk.add_code),
    (FunctionType, _Walk.add_function),
    (MethodType, _Walk.add_method),
    (BuiltinFunctionType, lambda walk, value: walk.parts.append(f"built in {value.__qualname__}")),
    (type, _Walk.add_class),
    (ModuleType, _Walk.add_module),
    (functools.partial, _Walk.add_partial),
    (functools.cached_property, lambda walk, value: walk.add(value.func)),
    (property, _Walk.add_property),
    ((staticmethod, classmethod), lambda walk, value: walk.add(value.__func__)),
    # The variables that code reads are recorded when it runs.
    (os._Environ, lambda walk, value: walk.parts.append("environ")),
    (_SLOTS, lambda walk, value: walk.parts.append(f"slot {value.__name__}")),
    (_WEAK, lambda walk, value: walk.parts.append("weak")),
    (MappingProxyType, lambda walk, value: walk.add_mapping(dict(value))),
    (re.Pattern, lambda walk, value: walk.add_all("pattern", (value.pattern, value.flags))),
)
