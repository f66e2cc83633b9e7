"""Names that a program may use without an import, as in programming contests.

They are the names of the modules that LiveCodeBench and others import before a program. Definitions
of the program take precedence, and none of these names counts as defined by the program.
"""

import builtins
import symtable
from functools import cache
from importlib import import_module

_STARRED = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random"),
    *("statistics", "itertools", "functools", "operator", "io", "sys", "json", "typing"),
)
_MODULES = [*_STARRED, "os", "time", "abc", "dataclasses", "decimal", "fractions", "enum", "queue"]
_OTHERS = {
    **{name: ("dataclasses", name) for name in ("dataclass", "field")},
    **{name: ("enum", name) for name in ("Enum", "IntEnum", "auto")},
    **{name: ("abc", name) for name in ("ABC", "abstractmethod")},
    "Decimal": ("decimal", "Decimal"),
    "Fraction": ("fractions", "Fraction"),
    "exit": ("sys", "exit"),
    "quit": ("sys", "exit"),
}


@cache
def _origins() -> dict[str, tuple[str, str | None]]:
    origins: dict[str, tuple[str, str | None]] = {}
    for name in _STARRED:
        module = import_module(name)
        public = [each for each in vars(module) if not each.startswith("_")]
        origins |= {each: (name, each) for each in getattr(module, "__all__", public)}
    return origins | _OTHERS | {name: (name, None) for name in _MODULES}


def preamble(program: str) -> str:
    """Returns Python that imports the names that a program reads without defining them.

    Example:
        >>> preamble("def f(x: List[int]): return x")
        'import builtins\\nfrom typing import List as _; builtins.List = _\\n'
        >>> preamble("from typing import List\\nx: List[int] = []")
        ''
    """
    lines = []
    for name in _read(program):
        if name in _origins():
            module, member = _origins()[name]
            imported = f"from {module} import {member} as _" if member else f"import {module} as _"
            lines.append(f"{imported}; builtins.{name} = _\n")
    return "".join(["import builtins\n", *lines]) if lines else ""


def unknown_names(program: str) -> list[str]:
    """Returns the names that a program reads but neither it nor the preamble defines."""
    return [name for name in _read(program) if name not in _origins()]


def _read(program: str) -> list[str]:
    try:
        table = symtable.symtable(program, "program", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    tables = [table]
    read: dict[str, None] = {}
    defined: set[str] = set()
    while tables:
        scope = tables.pop()
        tables += scope.get_children()
        for each in scope.get_symbols():
            if scope is table or each.is_global():
                if each.is_assigned() or each.is_imported():
                    defined.add(each.get_name())
                if each.is_referenced():
                    read.setdefault(each.get_name())
    special = {*vars(builtins), "__file__"} - {"exit", "quit"}
    return [name for name in read if name not in defined and name not in special]
