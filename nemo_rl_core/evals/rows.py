"""Rows of an evaluation: storage, reading and comparison."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_rl_core.errors import DataError
from nemo_rl_core.evals.comparison import Comparison, compare

Row = Mapping[str, Any]
"""`prompt_id`, `mode` (greedy or sampled), `sample`, `category`, `prompt`, `completion`, `answer`,
`extracted` (the answer in a majority vote), `reward`, `correct`, `truncated`, `error`,
`grader_version` (absent from old evaluations: 1)."""


def greedy_outcomes(rows: Sequence[Row]) -> dict[str, bool | None]:
    """Correctness of the greedy completions by prompt id, for a paired comparison."""
    return {str(row["prompt_id"]): row["correct"] for row in rows if row["mode"] == "greedy"}


def compare_rows(before: Sequence[Row], after: Sequence[Row], *, confidence: float) -> Comparison:
    """Compares the greedy completions of two evaluations prompt by prompt.

    The prompts and the versions of their graders must be equal.
    """
    old, new = (
        {row["prompt_id"]: row.get("grader_version") or 1 for row in rows}
        for rows in (before, after)
    )
    differing = [key for key, version in old.items() if new.get(key, version) != version]
    if differing:
        first = differing[0]
        raise DataError(
            f"different versions of a grader scored {len(differing)} of {len(old)} prompts, so a "
            "difference may be the graders'",
            expected="two evaluations by the same version",
            got=f"version {old[first]} and version {new[first]} for the prompt {first}",
            fix="evaluate the model of the older one again; see docs/evaluation.md",
        )
    return compare(greedy_outcomes(before), greedy_outcomes(after), confidence=confidence)


def save_eval_rows(rows: Sequence[Row], path: Path) -> None:
    """Writes the rows of an evaluation as parquet; equal rows give equal bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    _check(rows, path)
    pq.write_table(pa.Table.from_pylist(rows), path)


def load_eval_rows(path: Path) -> list[dict[str, Any]]:
    """Reads the rows of `save_eval_rows`; missing rewards are None."""
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    _check(rows, path)
    return rows


def compare_files(before: Path, after: Path, *, confidence: float) -> Comparison:
    """Compares two stored evaluations, of completions or of scored preference pairs."""
    import pyarrow.parquet as pq

    files = (before, after)
    if all("chosen_score" in pq.read_schema(path).names for path in files):
        return compare(*map(_pair_outcomes, files), confidence=confidence)
    return compare_rows(*map(load_eval_rows, files), confidence=confidence)


def _pair_outcomes(path: Path) -> dict[str, bool | None]:
    """Returns by pair id whether the chosen completion scores higher."""
    import pyarrow.parquet as pq

    from nemo_rl_core.data.frames import check_frame
    from nemo_rl_core.data.record_frames import PairEvalSchema

    pairs = pq.read_table(path).to_pandas()
    check_frame(PairEvalSchema, pairs, name=f"evaluation's {path.name}")
    return dict(zip(pairs.id, (pairs.chosen_score > pairs.rejected_score).tolist(), strict=True))


def _check(rows: Sequence[Row], path: Path) -> None:
    import pandas as pd

    from nemo_rl_core.data.frames import check_frame
    from nemo_rl_core.data.record_frames import EvalSchema

    check_frame(EvalSchema, pd.DataFrame(list(rows)), name=f"evaluation's {path.name}")


def changed_rows(before: Sequence[Row], after: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Greedy rows of the prompts that are correct in exactly one of two evaluations."""
    later = {row["prompt_id"]: row for row in after if row["mode"] == "greedy"}
    pairs = [(row, later[row["prompt_id"]]) for row in before if row["mode"] == "greedy"]
    return [pair for pair in pairs if {row["correct"] for row in pair} == {True, False}]
