"""`nemo-rl eval`: show an evaluation, or the changes between two."""

import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import rich_click

from nemo_rl_core.errors import DataError
from nemo_rl_core.evals.rows import Row, changed_rows, compare_rows, load_eval_rows
from tasks.cli.records.names import artifact_folder, complete_artifacts

_CONFIDENCE = 0.95
_VERDICTS = {"right": True, "wrong": False, "unscored": None}


@rich_click.command("eval")
@click.argument("evaluation", shell_complete=complete_artifacts)
@click.argument("after", required=False, shell_complete=complete_artifacts)
@click.option("--number", "-n", type=click.IntRange(min=0), default=5, show_default=True,
              help="How many prompts to print.")  # fmt: skip
@click.option("--only", type=click.Choice(["right", "unscored", "wrong"]),
              help="Only completions with this verdict.")  # fmt: skip
@click.option("--mode", type=click.Choice(["greedy", "sampled"]), default="greedy",
              show_default=True, help="Which completions to print.")  # fmt: skip
def evaluate(evaluation: str, after: str | None, number: int, only: str | None, mode: str) -> None:
    """Print completions of an evaluation, or the changes between two.

    EVALUATION is an artifact by its id, its folder, or its rows.parquet. With AFTER, a later
    evaluation, the command prints the prompts that are correct in only one of the two.
    """
    rows = _read_evaluation(artifact_folder(evaluation))
    if after is None:
        lines = _completion_lines(rows, number, mode=mode, only=only)
    else:
        lines = _change_lines(rows, _read_evaluation(artifact_folder(after)), number)
    for line in lines:
        click.echo(line)


def _read_evaluation(path: Path) -> list[dict[str, Any]]:
    import pyarrow as pa

    file = path / "rows.parquet" if path.is_dir() else path
    try:
        return load_eval_rows(file)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(
            f"there is no evaluation in {str(path)!r}",
            expected="an evaluation by its id, or its folder with rows.parquet",
            got=str(error).splitlines()[0][:200],
            fix="use the id or folder of an evaluation of this store (NEMO_RL_HOME)",
        ) from error


def _completion_lines(
    rows: Sequence[Row], number: int, *, mode: str = "greedy", only: str | None = None
) -> Iterator[str]:
    """Yields the first `number` completions of a `mode` and verdict, and their total number."""
    chosen = [row for row in rows if row["mode"] == mode]
    if only:
        chosen = [row for row in chosen if row["correct"] is _VERDICTS[only]]
    for row in chosen[:number]:
        yield from (f"prompt {_escaped(row['prompt_id'])}", *_body(row), "")
    condition = f" that are {only}" if only else ""
    yield f"{min(number, len(chosen))} of {len(chosen)} {mode} completions{condition}"


def _change_lines(before: Sequence[Row], after: Sequence[Row], number: int) -> Iterator[str]:
    """Yields the first prompts that are correct in one of two evaluations and wrong in the other.

    Their total number and the verdict of the paired comparison follow.
    """
    compared = compare_rows(before, after, confidence=_CONFIDENCE)
    pairs = changed_rows(before, after)
    for old, new in pairs[:number]:
        sign = "gained" if new["correct"] else "lost"
        yield f"prompt {_escaped(old['prompt_id'])}: {sign}"
        yield from (*_body(old), f"then: {_escaped(new['completion'])}", "")
    yield f"{min(number, len(pairs))} of {len(pairs)} prompts that changed"
    yield compared.verdict


def _body(row: Row) -> Iterator[str]:
    verdict = next(word for word, value in _VERDICTS.items() if value is row["correct"])
    yield f"asked: {_escaped(row['prompt'])}"
    yield f"completion: {_escaped(row['completion'])}{' (cut off)' if row['truncated'] else ''}"
    yield f"{verdict}: answer {_escaped(row['answer'])}, reward {row['reward']}"
    if row["error"] is not None:
        yield f"error: {_escaped(row['error'])}"


def _escaped(text: object) -> str:
    return "".join("\n  " if character == "\n" else _escape(character) for character in str(text))


def _escape(character: str) -> str:
    if unicodedata.category(character).startswith("C"):
        return character.encode("unicode_escape").decode()
    return character
