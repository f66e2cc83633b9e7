"""What the code of a function reads: globals, modules, constants."""

import dis
from collections.abc import Iterator
from types import CodeType
from typing import Any

_READS = ("LOAD_GLOBAL", "LOAD_NAME")


def globals_read(code: CodeType) -> Iterator[str]:
    """Names of globals that code reads, its inner functions' too."""
    for each in _codes(code):
        for instruction in dis.get_instructions(each):
            if instruction.opname in _READS:
                yield str(instruction.argval)


def modules_imported(code: CodeType) -> list[str]:
    """Modules that code imports when it runs."""
    found = {
        str(instruction.argval)
        for instruction in dis.get_instructions(code)
        if instruction.opname == "IMPORT_NAME" and instruction.argval
    }
    return sorted(found)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code and that of functions within it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def content_of(cell: Any) -> Any:
    """What a closure's cell holds; None while it is empty."""
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
