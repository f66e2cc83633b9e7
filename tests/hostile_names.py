"""100 names in objects, archives or records that try to lead a reader out of its folder."""

from collections.abc import Iterator
from pathlib import Path

DEPTHS = (1, 2, 3, 5, 8)


def hostile_names(outside: Path) -> list[str]:
    """Returns names for which no file may be written outside of the reader's folder.

    Args:
        outside: A folder outside of the reader's folder; some of the names contain its path.
    """
    names = [*dict.fromkeys(_names(str(outside)))]
    assert len(names) == 100, len(names)
    return names


def _names(outside: str) -> Iterator[str]:
    for depth in DEPTHS:
        up = "../" * depth
        yield f"{up}evil"
        yield f"model/{up}evil"
        yield f"{up}{outside.lstrip('/')}/evil"
        yield f"a/b/c/{up}{up}evil.pth"
        yield f"./{up}evil"
        yield f"//{up}evil"
        yield up + ".."
    yield from (outside, f"{outside}/evil", f"/{outside}/evil", f"//{outside}/evil")
    yield from (f"a/{outside}/evil", f"a//{outside}/evil", f"model/{outside}/evil")
    yield from ("..", ".", "/", "//", "///", "...", "a/..", "a/.", "a/../", "a/./", "./", "../")
    yield from ("a//b", "a///b", "//a", "a/../a", "a/./b", "./a", "././a")
    yield from ("a\\b", "..\\evil", "..\\..\\evil", "\\evil", "C:\\evil", "\\\\host\\share\\evil")
    yield from (
        "a\0b",
        "\0",
        "../\0evil",
        "evil\0/../../x",
        "a\tb",
        "a\x7fb",
        "a\x1b[31mb",
        "\u202eevil",
    )
    yield from ("%2e%2e/evil", "%2e%2e%2fevil", "..%2fevil", "%252e%252e/evil", "..%00/evil")
    yield from ("%c0%ae%c0%ae/evil", "..;/evil", "....//evil", "..../evil")
    yield from (
        "\u2024\u2024/evil",
        "\uff0e\uff0e/evil",
        "..\u2215evil",
        "..\uff0fevil",
        "\u2025/evil",
    )
    yield from ("~/evil", "~root/evil", "$HOME/evil", "${HOME}/evil", "`id`", "-rf", "a b")
    yield from ("x" * 300, "x/" * 300 + "x", "é" * 150, "../" * 200 + "evil")
