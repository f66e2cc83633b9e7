"""Standard streams of the two sandboxes, which carry the protocol instead of printed text."""

import os
import sys


def silence() -> None:
    """Redirects the standard streams to the null device; callers keep duplicates they need."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
