"""An evaluation as lines of text: its completions, or what changed between two.

Control characters that a model wrote are spelled out, so that they cannot move the cursor or colour
the terminal.
"""

import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nemo_rl_core.errors import DataError
from nemo_rl_core.evals.comparison import compare
from nemo_rl_core.evals.rows import Row, changed_rows, greedy_outcomes, load_rows

_CONFIDENCE = 0.95
_VERDICTS = {"right": True, "wrong": False, "unscored": None}


def read_evaluation(path: Path) -> list[dict[str, Any]]:
    """The rows of an evaluation.

    Args:
        path: The folder of an evaluate stage, or its `rows.parquet`.

    Raises:
        DataError: If there is no such file, or its rows are not those of an evaluation.
    """
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


def completion_lines(
    rows: Sequence[Row], number: int, *, mode: str = "greedy", only: str | None = None
) -> Iterator[str]:
    """The first completions of an evaluation, and how many there are.

    Args:
        rows: As `read_evaluation` returns them.
        number: At most so many completions.
        mode: `greedy` or `sampled`.
        only: `right`, `wrong` or `unscored`; all three unless given.
    """
    chosen = [row for row in rows if row["mode"] == mode]
    if only:
        chosen = [row for row in chosen if row["correct"] is _VERDICTS[only]]
    for row in chosen[:number]:
        yield from (f"prompt {_shown(row['prompt_id'])}", *_body(row), "")
    what = f" that are {only}" if only else ""
    yield f"{min(number, len(chosen))} of {len(chosen)} {mode} completions{what}"


def change_lines(before: Sequence[Row], after: Sequence[Row], number: int) -> Iterator[str]:
    """The first prompts that one of two evaluations answers right and the other wrong.

    After them how many there are, and the verdict of the paired comparison.

    Args:
        before: As `read_evaluation` returns them.
        after: Of the later evaluation, on the same prompts.
        number: At most so many prompts.

    Raises:
        DataError: If the two cannot be compared.
    """
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
