"""Prints how many verdicts of each grader are right: `make graders`."""

import sys

from tests.graders.tables import KNOWN_FAULTS, verdicts


def main() -> None:
    """Prints counts by kind, and each verdict that is wrong."""
    counts: dict[str, list[int]] = {}
    wrong = []
    for row, score in verdicts():
        right, total = counts.setdefault(row.kind, [0, 0])
        is_right = score == row.score
        counts[row.kind] = [right + is_right, total + 1]
        if not is_right:
            known = " (known)" if row in KNOWN_FAULTS else ""
            wrong.append(f"{row.kind}: {row.answer!r}, {row.completion!r}: {score}{known}\n")
    for kind, (right, total) in counts.items():
        sys.stdout.write(f"{right:4} of {total:3}  {kind}\n")
    right, total = (sum(column) for column in zip(*counts.values(), strict=True))
    sys.stdout.write(f"{right:4} of {total:3}\n\n{''.join(wrong)}")


if __name__ == "__main__":
    main()
