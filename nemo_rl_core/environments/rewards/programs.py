"""Extracts the program from a completion."""

import ast
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from nemo_rl_core.environments.rewards.code_checker.preamble import unknown_names
from nemo_rl_core.environments.rewards.final_answers import after_thinking

_OPENING = re.compile(
    r"(?P<indent>[ \t>]*(?:(?:[-*+]|\d+[.)])[ \t]+)?)(?P<mark>`{3,}|~{3,})(?P<info>[^`\n]*)$"
)
_PYTHON = re.compile(r"\{?\.?\s*(?:python|py|pypy)[\d.]*(?![\w-])", re.IGNORECASE)
_QUOTED_TAG = re.compile(r"(?<=[\"'\\])<(?=/?\w+>)|<(?=/?\w+>[\"'])|(?<=[^`]`)<(?=/?\w+>`)")
_ANSWER = re.compile(r"<answer>", re.IGNORECASE)
_ANSWER_END = re.compile(r"</answer>", re.IGNORECASE)
_MARK = "\0"
_MOST_ENDINGS = 10
"""Number of lines tried as the end of a block, since strings in the program may contain fences."""
_READS = {"input", "stdin", "fileinput"}
"""Names with which a program reads its input."""


def extract_program(completion: str, names: Sequence[str] = (), given: str = "") -> str:
    """Returns the program in a completion, without its thinking.

    The program is the last block of Python that defines one of the names, else the last block that
    is a complete program: it compiles, all its names are defined, and it is more than a value.
    Blocks labeled with another language do not count, nor do unlabeled blocks if another one is
    labeled Python. Earlier blocks whose names the program uses are prepended to it. Without any
    block the full text is the program.

    Args:
        completion: Text of the completion; only its last `<answer>` counts, if there is one.
        names: Names that the program must define; empty for a program that reads an input.
        given: Python that the completion may continue, and that the program begins with.

    Example:
        >>> extract_program("So:\\n```python\\nx = 1\\n```\\nIt prints\\n```\\n1\\n```")
        'x = 1\\n'
    """
    text = _answer(completion)
    blocks = [_Block(*each, given) for each in _fenced(text)]
    chosen = _chosen(blocks, {*names, "Solution"} if names else set())
    if chosen is None:
        has_blocks = any(each.is_python is not None for each in blocks)
        return text if has_blocks else _Block(text.strip("\n"), True, given).full
    return "\n".join([*_needed(blocks, chosen), chosen.full])


@dataclass(frozen=True)
class _Block:
    """Fenced block; `is_python` is None without a label. It may continue `given`."""

    text: str
    is_python: bool | None
    given: str

    @cached_property
    def full(self) -> str:
        """The block after the given Python, in the first combination that compiles."""
        plain = self.text
        candidates = [plain]
        if self.given:
            start = self.given.rstrip("\n") + "\n"
            candidates = [start + plain, start + "    " + plain.lstrip(), plain]
        candidates += [textwrap.dedent(each) for each in candidates]
        return next((each for each in candidates if _compiles(each)), plain)

    @cached_property
    def tree(self) -> ast.Module | None:
        return ast.parse(self.full) if _compiles(self.full) else None

    @cached_property
    def defined(self) -> set[str]:
        text = self.text if _compiles(self.text) else textwrap.dedent(self.text)
        return _defined(ast.parse(text)) if _compiles(text) else set()

    @cached_property
    def unknown(self) -> set[str]:
        return set(unknown_names(self.full))

    @property
    def continues(self) -> bool:
        """Whether the block is the body of the given function."""
        return bool(self.given) and not _compiles(self.text.strip("\n"))

    @property
    def is_program(self) -> bool:
        return self.tree is not None and not all(map(_is_value, self.tree.body))

    @property
    def reads(self) -> bool:
        nodes = ast.walk(self.tree) if self.tree else ()
        return any(_READS & {getattr(n, "id", ""), getattr(n, "attr", "")} for n in nodes)


def _answer(completion: str) -> str:
    # A program may contain a string such as "<answer>".
    text = after_thinking(_QUOTED_TAG.sub(_MARK, completion))
    if tags := list(_ANSWER.finditer(text)):
        text = _ANSWER_END.split(text[tags[-1].end() :])[0]
    return text.replace(_MARK, "<")


def _chosen(blocks: Sequence[_Block], names: set[str]) -> _Block | None:
    programs = [each for each in blocks if each.is_program]
    defining = [each for each in programs if names & each.defined]
    continuing = [each for each in programs if each.continues]
    if best := defining or continuing:
        return best[-1]
    python = [each for each in programs if each.is_python] or programs
    before: set[str] = set()
    complete = []
    for each in python:
        if not each.unknown & before or (each.reads and not names):
            complete.append(each)
        before |= each.defined
    resolved = [each for each in complete if not each.unknown - before] or complete
    if resolved:
        return resolved[-1]
    labeled = [each for each in blocks if each.is_python]
    return labeled[-1] if labeled else None


def _needed(blocks: Sequence[_Block], chosen: _Block) -> list[str]:
    earlier: list[str] = []
    unknown = set(chosen.unknown)
    for each in reversed(blocks[: blocks.index(chosen)]):
        if each.is_program and unknown & each.defined and each.is_python is not False:
            earlier.insert(0, each.text)
            unknown = (unknown - each.defined) | each.unknown
    return earlier


def _fenced(text: str) -> Iterator[tuple[str, bool | None]]:
    """Yields the blocks labeled Python or without label, in order, including an unclosed one."""
    lines = text.splitlines(keepends=True)
    index = 0
    while index < len(lines):
        opening = _OPENING.match(lines[index].rstrip("\r\n"))
        index += 1
        if opening is None:
            continue
        mark, info = opening["mark"], opening["info"].strip()
        ends = [n for n in range(index, len(lines)) if _closes(lines[n], mark)] or [len(lines)]
        is_python = bool(_PYTHON.match(info)) if info else None
        inner = [_without(line, opening["indent"]) for line in lines[index:]]
        choices = [(end, "".join(inner[: end - index])) for end in ends[:_MOST_ENDINGS]]
        end, block = choices[0]
        if is_python:
            end, block = next((each for each in choices if _compiles(each[1])), choices[0])
        index = end + 1
        if is_python is not False:
            yield block, is_python


def _closes(line: str, mark: str) -> bool:
    text = line.strip().lstrip("> ")
    return len(text) >= len(mark) and not text.strip(mark[0])


def _without(line: str, indent: str) -> str:
    if ">" in indent:
        line = re.sub(r"^[ \t]*>[ \t]?", "", line)
        indent = indent.replace(">", "", 1)
    count = 0
    while count < min(len(indent), len(line)) and line[count] in " \t":
        count += 1
    return line[count:]


def _compiles(source: str) -> bool:
    try:
        compile(source, "program", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return False
    return True


def _defined(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        else:
            names |= {
                each.id
                for each in ast.walk(node)
                if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            }
            # Tests in a completion import the program's names from a module that does not exist.
            is_of_program = isinstance(node, ast.ImportFrom) and not _is_standard(node)
            if isinstance(node, ast.Import | ast.ImportFrom) and not is_of_program:
                names |= {each.asname or each.name.partition(".")[0] for each in node.names}
    return names


def _is_standard(node: ast.ImportFrom) -> bool:
    return (node.module or "").partition(".")[0] in sys.stdlib_module_names


def _is_value(node: ast.stmt) -> bool:
    """Whether a statement computes nothing, such as printed output that is valid Python."""
    return isinstance(node, ast.Expr) and not any(
        isinstance(each, ast.Call | ast.Await | ast.Yield) for each in ast.walk(node)
    )
