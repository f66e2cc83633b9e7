"""Rows of an evaluation: storage, reading and comparison."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
"""`prompt_id`, `mode` (greedy or sampled), `sample`, `category`, `prompt`, `completion`, `answer`,
`extracted` (the answer in a majority vote), `reward`, `correct`, `truncated`, `error`."""


def greedy_outcomes(rows: Sequence[Row]) -> dict[str, bool | None]:
    """Correctness of the greedy completions by prompt id, for a paired comparison."""
    return {str(row["prompt_id"]): row["correct"] for row in rows if row["mode"] == "greedy"}


def save_eval_rows(rows: Sequence[Row], path: Path) -> None:
    """Writes the rows of an evaluation as parquet; equal rows give equal bytes.

    Raises:
        DataError: Names the rows that are not of `EvalSchema`.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    _check(rows, path)
    pq.write_table(pa.Table.from_pylist(rows), path)


def load_eval_rows(path: Path) -> list[dict[str, Any]]:
    """Reads the rows of `save_rows`; missing rewards are None.

    Raises:
        DataError: Names the rows that are not of `EvalSchema`.
    """
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    _check(rows, path)
    return rows


def load_outcomes(path: Path) -> dict[str, bool | None]:
    """Reads what a paired comparison needs of a stored evaluation.

    Args:
        path: Rows of completions, or of scored preference pairs.

    Returns:
        By prompt id, whether the greedy completion is correct, None if it could not be scored; by
        pair id, whether the chosen completion scores higher.

    Raises:
        DataError: Names the rows that are of neither schema.
    """
    import pyarrow.parquet as pq

    if "chosen_score" not in pq.read_schema(path).names:
        return greedy_outcomes(load_eval_rows(path))
    from nemo_rl_core.data.frame_faults import check_frame
    from nemo_rl_core.data.record_frames import PairEvalSchema

    pairs = pq.read_table(path).to_pandas()
    check_frame(PairEvalSchema, pairs, name=f"evaluation's {path.name}")
    return dict(zip(pairs.id, (pairs.chosen_score > pairs.rejected_score).tolist(), strict=True))


def _check(rows: Sequence[Row], path: Path) -> None:
    import pandas as pd

    from nemo_rl_core.data.frame_faults import check_frame
    from nemo_rl_core.data.record_frames import EvalSchema

    check_frame(EvalSchema, pd.DataFrame(list(rows)), name=f"evaluation's {path.name}")


def changed_rows(before: Sequence[Row], after: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Greedy rows of the prompts that are correct in exactly one of two evaluations."""
    later = {row["prompt_id"]: row for row in after if row["mode"] == "greedy"}
    pairs = [(row, later[row["prompt_id"]]) for row in before if row["mode"] == "greedy"]
    return [pair for pair in pairs if {row["correct"] for row in pair} == {True, False}]
