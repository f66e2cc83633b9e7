"""Read an evaluation: `python -m nemo_rl_core.evals EVALUATION [-n 5] [--only wrong]`.

With the folder of a second evaluation after the first, the two are compared on their prompts, and
the completions of prompts that only one of them answers right are printed.
"""

import argparse
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_rl_core.errors import DataError, NemoRLError
from nemo_rl_core.evals.comparison import compare
from nemo_rl_core.evals.rows import changed_rows, greedy_outcomes, load_rows

Row = Mapping[str, Any]

_CONFIDENCE = 0.95
_VERDICTS = {"right": True, "wrong": False, "unjudged": None}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints completions of one evaluation, or what changed between two.

    Returns:
        The exit code: 0, or 1 after an error that has been explained.
    """
    parser = argparse.ArgumentParser(
        prog="python -m nemo_rl_core.evals",
        description="Print completions of an evaluation, or what changed between two.",
    )
    parser.add_argument("evaluation", type=Path, help="an evaluation's folder, or its rows.parquet")
    parser.add_argument("after", type=Path, nargs="?", help="a later one, to compare")
    parser.add_argument("-n", "--number", type=int, default=5, help="how many prompts to print")
    parser.add_argument("--only", choices=sorted(_VERDICTS), help="only completions judged so")
    parser.add_argument("--mode", choices=["greedy", "sampled"], default="greedy")
    given = parser.parse_args(arguments)
    try:
        rows = _read(given.evaluation)
        lines = (
            _changes(rows, _read(given.after), given.number)
            if given.after
            else _completions(rows, given)
        )
        for line in lines:
            sys.stdout.write(line + "\n")
    except NemoRLError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _read(path: Path) -> list[dict[str, Any]]:
    import pyarrow as pa

    file = path / "rows.parquet" if path.is_dir() else path
    try:
        return load_rows(file)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(
            f"there is no evaluation in {str(path)!r}",
            expected="the folder of an evaluate stage, with rows.parquet in it",
            got=str(error).splitlines()[0][:200],
            fix="use the folder that the run printed after `completions:`",
        ) from error


def _completions(rows: Sequence[Row], given: argparse.Namespace) -> Iterator[str]:
    chosen = [row for row in rows if row["mode"] == given.mode]
    if given.only:
        chosen = [row for row in chosen if row["correct"] is _VERDICTS[given.only]]
    for row in chosen[: given.number]:
        yield from (f"prompt {_shown(row['prompt_id'])}", *_body(row), "")
    what = f" judged {given.only}" if given.only else ""
    yield f"{min(given.number, len(chosen))} of {len(chosen)} {given.mode} completions{what}"


def _changes(before: Sequence[Row], after: Sequence[Row], number: int) -> Iterator[str]:
    compared = compare(
        greedy_outcomes(before), greedy_outcomes(after), confidence=_CONFIDENCE, seed=0
    )
    pairs = changed_rows(before, after)
    for old, new in pairs[:number]:
        sign = "gained" if new["correct"] else "lost"
        yield f"prompt {_shown(old['prompt_id'])}: {sign}"
        yield from (*_body(old), f"then: {_shown(new['completion'])}", "")
    yield f"{min(number, len(pairs))} of {len(pairs)} prompts that changed"
    yield compared.verdict


def _body(row: Row) -> Iterator[str]:
    verdict = next(word for word, value in _VERDICTS.items() if value is row["correct"])
    yield f"asked: {_shown(row['prompt'])}"
    yield f"said: {_shown(row['completion'])}{' (cut off)' if row['truncated'] else ''}"
    yield f"{verdict}: the answer is {_shown(row['answer'])}, the reward {row['reward']}"
    if row["error"] is not None:
        yield f"error: {_shown(row['error'])}"


def _shown(text: object) -> str:
    """Any text without what would move the cursor or colour the terminal; lines are indented."""
    return "".join("\n  " if character == "\n" else _spelled(character) for character in str(text))


def _spelled(character: str) -> str:
    if unicodedata.category(character).startswith("C"):
        return character.encode("unicode_escape").decode()
    return character


if __name__ == "__main__":
    sys.exit(main())
