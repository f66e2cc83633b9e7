"""Comparison of the evaluations of two runs, prompt by prompt."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl_core.errors import NemoRLError
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import ArtifactRow, Execution, point_label
from nemo_rl_core.ui.ancestry import base_stage

if TYPE_CHECKING:
    from nemo_rl_core.evals.comparison import Comparison

_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Compared:
    """An evaluation that both runs have.

    Attributes:
        name: The evaluated stage.
        artifacts: Ids of the evaluations in the first and in the second run.
        compared: The comparison; None where the two cannot be compared.
        refused: The reason if they cannot be compared.
    """

    name: str
    artifacts: tuple[str, str]
    compared: "Comparison | None" = None
    refused: str = ""


def compared(history: History, before: Execution, after: Execution) -> list[Compared]:
    """Compares evaluations of the same stage, of each run the one with the most steps.

    Evaluations of a sweep's points are compared with those of the same point.
    """
    old, new = _evaluations(history, before), _evaluations(history, after)
    return [_compare(name, old[name], new[name]) for name in old if name in new]


def _evaluations(history: History, run: Execution) -> dict[str, ArtifactRow]:
    found: dict[str, ArtifactRow] = {}
    points = history.points_of(run.id)
    for one in history.artifacts_of(run.id):
        parents = one.manifest.get("parents", ())
        if one.kind != "evaluation" or not (Path(one.path) / "rows.parquet").is_file():
            continue
        models = [p["stage"] for p in parents if p["kind"] in ("checkpoint", "model")]
        name = f"{base_stage(one.stage)} of {base_stage(models[0]) if models else 'a model'}"
        if one.id in points:
            name += f" ({point_label(points[one.id])})"
        if name not in found or (one.step or 0) >= (found[name].step or 0):
            found[name] = one
    return found


def _compare(name: str, old: ArtifactRow, new: ArtifactRow) -> Compared:
    ids = (old.id, new.id)
    try:
        return Compared(
            name, ids, _measured(old.path, old.content_hash, new.path, new.content_hash)
        )
    except NemoRLError as error:
        return Compared(name, ids, refused=str(error))
    except (OSError, KeyError, ValueError) as error:  # pyarrow's errors are ValueErrors
        return Compared(name, ids, refused=f"The rows of one of them cannot be read: {error}")


@functools.lru_cache(maxsize=64)
def _measured(old: str, _old_hash: str, new: str, _new_hash: str) -> "Comparison":
    """Compares two evaluations. Artifacts never change, so their hashes are the cache's key."""
    from nemo_rl_core.evals.comparison import compare
    from nemo_rl_core.evals.rows import load_outcomes

    before, after = (load_outcomes(Path(folder) / "rows.parquet") for folder in (old, new))
    return compare(before, after, confidence=_CONFIDENCE)
