"""Evaluations of several runs: paired verdicts, and answers to the same prompts side by side."""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_core.errors import NemoRLError
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import ArtifactRow, point_label
from nemo_rl_core.history.run_columns import RunRow
from nemo_rl_core.ui.ancestry import base_stage

if TYPE_CHECKING:
    from nemo_rl_core.evals.comparison import Comparison

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Compared:
    """An evaluation that two runs have.

    Attributes:
        labels: Names of the first and of the other run.
        compared: The comparison; None if the two cannot be compared.
        refused: The reason why they cannot be compared; empty if they can.
    """

    name: str
    labels: tuple[str, str]
    artifacts: tuple[str, str]
    compared: "Comparison | None" = None
    refused: str = ""

    @property
    def verdict(self) -> str:
        """One sentence that says which run is better."""
        assert self.compared is not None
        first, other = self.labels
        sure = f"at {100 * self.compared.confidence:.3g} % confidence"
        if self.compared.low > 0:
            verdict = f"{other} is better than {first} {sure}"
        elif self.compared.high < 0:
            verdict = f"{first} is better than {other} {sure}"
        else:
            verdict = f"no difference shown {sure}"
        return (
            f"{verdict}: {self.compared.measured} on {self.compared.num_prompts} prompts; "
            f"{self.compared.sensitivity}"
        )


def compared(history: History, rows: Sequence[RunRow], labels: Mapping[str, str]) -> list[Compared]:
    """Compares every run with the first, by evaluations of the same stage.

    Points of several sweeps are compared with the same point of the first. Several comparisons
    have a higher confidence each, so that all of them hold together (Bonferroni). From each run
    the evaluation with the most steps counts.
    """
    evaluations = {row.id: _evaluations(history, row) for row in rows}
    same = {json.dumps(dict(r.point)): r for r in rows if r.run == rows[0].run and r.point}
    pairs = [
        (same[point], row)
        for row in rows
        if row.run != rows[0].run and (point := json.dumps(dict(row.point))) in same
    ] or [(rows[0], row) for row in rows[1:]]
    named = [
        (name, first, row)
        for first, row in pairs
        for name in evaluations[first.id]
        if name in evaluations[row.id]
    ]
    confidence = confidence_of_each(len(pairs))
    return [
        _compare(
            f"{name} ({point_label(row.point)})" if first.point == row.point != {} else name,
            (labels[first.id], labels[row.id]),
            evaluations[first.id][name],
            evaluations[row.id][name],
            confidence,
        )
        for name, first, row in named
    ]


def _evaluations(history: History, row: RunRow) -> dict[str, ArtifactRow]:
    evaluations: dict[str, ArtifactRow] = {}
    points = history.points_of(row.run)
    for one in history.artifacts_of(row.run):
        parents = one.manifest.get("parents", ())
        if one.kind != "evaluation" or not (Path(one.path) / "rows.parquet").is_file():
            continue
        if row.node is not None and points.get(one.id) != row.point:
            continue
        models = [p["stage"] for p in parents if p["kind"] in ("checkpoint", "model")]
        name = f"{base_stage(one.stage)} of {base_stage(models[0]) if models else 'a model'}"
        if name not in evaluations or (one.step or 0) >= (evaluations[name].step or 0):
            evaluations[name] = one
    return evaluations


def _compare(
    name: str, labels: tuple[str, str], old: ArtifactRow, new: ArtifactRow, confidence: float
) -> Compared:
    measured = paired(old, new, confidence=confidence)
    if isinstance(measured, str):
        return Compared(name, labels, (old.id, new.id), refused=measured)
    return Compared(name, labels, (old.id, new.id), measured)


def confidence_of_each(num_comparisons: int) -> float:
    """Returns the confidence of each comparison so that all hold together (Bonferroni)."""
    return 1 - (1 - CONFIDENCE) / max(1, num_comparisons)


def paired(old: ArtifactRow, new: ArtifactRow, *, confidence: float) -> "Comparison | str":
    """Compares two evaluations prompt by prompt; a text says why it is impossible."""
    try:
        return _measured(old.path, old.content_hash, new.path, new.content_hash, confidence)
    except NemoRLError as error:
        return str(error)
    except (OSError, KeyError, ValueError) as error:  # pyarrow's errors are ValueErrors
        return f"The rows of one of them cannot be read: {error}"


@functools.lru_cache(maxsize=256)
def _measured(
    old: str, _old_hash: str, new: str, _new_hash: str, confidence: float
) -> "Comparison":
    """Compares two evaluations; artifacts never change, so hashes are the cache's key."""
    from nemo_rl_core.evals.rows import compare_files

    before, after = (Path(folder) / "rows.parquet" for folder in (old, new))
    return compare_files(before, after, confidence=confidence)


@dataclass(frozen=True)
class Answered:
    """A prompt with the greedy completions of all runs."""

    prompt: str
    answer: str
    completions: tuple[Mapping[str, Any], ...]


def side_by_side(
    history: History, rows: Sequence[RunRow], start: int, limit: int
) -> tuple[list[Answered], int]:
    """Returns a part of the prompts that all runs were evaluated on, and their number.

    Prompts that only some of the runs solve are first.
    """
    tables = []
    for row in rows:
        evaluations = list(_evaluations(history, row).values())
        if not evaluations:
            return [], 0
        try:
            tables.append(_greedy(evaluations[-1].path, evaluations[-1].content_hash))
        except (OSError, KeyError, ValueError):
            return [], 0
    shared = [key for key in tables[0] if all(key in table for table in tables[1:])]
    shared.sort(key=lambda key: len({bool(table[key]["correct"]) for table in tables}) == 1)
    return [
        Answered(
            str(tables[0][key]["prompt"]),
            str(tables[0][key]["answer"]),
            tuple(table[key] for table in tables),
        )
        for key in shared[start : start + limit]
    ], len(shared)


@functools.lru_cache(maxsize=32)
def _greedy(folder: str, _hash: str) -> dict[str, Mapping[str, Any]]:
    """Returns the greedy rows of an evaluation by prompt; empty for evaluations of pairs."""
    import pyarrow.parquet as pq

    path = Path(folder) / "rows.parquet"
    columns = ["prompt_id", "mode", "prompt", "completion", "answer", "reward", "correct"]
    if not set(columns) <= set(pq.read_schema(path).names):
        return {}
    rows = pq.read_table(path, columns=columns, filters=[("mode", "=", "greedy")]).to_pylist()
    return {str(row["prompt_id"]): row for row in rows}
