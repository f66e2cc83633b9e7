"""Prints the number of right verdicts of each grader: `make graders`."""

import sys
from collections.abc import Iterable
from typing import Any

from tests.graders.code import code_verdicts
from tests.graders.multiple_choice import KNOWN_CHOICE_FAULTS, choice_verdicts
from tests.graders.tables import KNOWN_FAULTS, verdicts


def main() -> None:
    """Prints counts by kind, and each verdict that is wrong."""
    tables = {
        "math": verdicts(),
        "multiple_choice": choice_verdicts(),
        "code": code_verdicts(),
    }
    for grader, rows in tables.items():
        sys.stdout.write(f"{grader}\n")
        _print(rows)


def _print(rows: Iterable[tuple[Any, Any]]) -> None:
    counts: dict[str, list[int]] = {}
    wrong = []
    for row, score in rows:
        right, total = counts.setdefault(row.kind, [0, 0])
        is_right = score == row.score
        counts[row.kind] = [right + is_right, total + 1]
        if not is_right:
            note = (
                " (known)"
                if any(row is each for each in KNOWN_FAULTS | KNOWN_CHOICE_FAULTS)
                else ""
            )
            wrong.append(f"{row.kind}: {row[1]!r}, {row.completion!r}: {score}{note}\n")
    for kind, (right, total) in counts.items():
        sys.stdout.write(f"{right:4} of {total:3}  {kind}\n")
    right, total = (sum(column) for column in zip(*counts.values(), strict=True))
    sys.stdout.write(f"{right:4} of {total:3}\n\n{''.join(wrong)}")


if __name__ == "__main__":
    main()
