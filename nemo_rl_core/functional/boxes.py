r"""Answers in LaTeX boxes."""

import re

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*(\{)?")
_WORD = re.compile(r"[^\s$]+")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BETWEEN = re.compile(
    r"(?=.*?(?:[,;]|and|or))[\s$,;&]*(?:\\?(?:and|or|text\{\s*(?:and|or)\s*\})[\s$]*)?"
    r"(?:[a-zA-Z](?:_\{?\w\}?)?\s*=\s*)?[\s$]*"
)
"""Text between boxes of one answer: `\boxed{1}$ and $x=\boxed{2}`."""
_LONGEST_BETWEEN = 60


def last_boxes(text: str, *, is_cut: bool = False) -> str | None:
    r"""Returns the contents of the last boxes that form one answer, separated by commas.

    As in TeX, `\boxed 5` contains the word after it, and an escaped brace does not open a group.

    Args:
        text: A solution.
        is_cut: Whether an unclosed box contains the rest of its line; else it is ignored.

    Example:
        >>> last_boxes(r"\boxed{1} so \boxed{\frac{1}{2}}.")
        '\\frac{1}{2}'
        >>> last_boxes(r"$x=\boxed{1}$ and $x=\boxed{2}$")
        '1,2'
        >>> last_boxes(r"\boxed{\frac{1}{2}") is None
        True
    """
    contents: list[str] = []
    end = 0
    for box in _BOX.finditer(text):
        if box.start() < end:
            continue  # a box in a box
        if contents and not _BETWEEN.fullmatch(text[end : box.start()][:_LONGEST_BETWEEN]):
            contents.clear()
        content, end = _content(text, box)
        if content is None and is_cut:
            content = text[box.end() :].split("\n", 1)[0]
        contents = [*contents, content] if content is not None else []
    return ",".join(each for each in map(str.strip, contents) if each) or None


def _content(text: str, box: re.Match[str]) -> tuple[str | None, int]:
    """Returns the content of a box (None if it is not closed) and the index after it."""
    start = box.end()
    if box[1] is None:
        word = _WORD.match(text, start)
        return (word[0].rstrip(".,"), word.end()) if word else ("", start)
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            return text[start : brace.start()], brace.end()
    return None, len(text)
