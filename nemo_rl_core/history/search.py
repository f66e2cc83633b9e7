"""Queries over everything recorded, for the search of the page."""

from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import ArtifactRow
from nemo_rl_core.history.rows import read_artifact

_NODES_SEARCHED = 500

# The names of a node are visited one by one through the index: DISTINCT would read every step.
_METRICS = """
WITH RECURSIVE
  recent(node) AS (SELECT id FROM nodes ORDER BY id DESC LIMIT ?),
  named(node, name) AS (
    SELECT node, (SELECT min(name) FROM metrics WHERE metrics.node = recent.node) FROM recent
    UNION ALL
    SELECT node, (SELECT min(name) FROM metrics
                  WHERE metrics.node = named.node AND metrics.name > named.name)
    FROM named WHERE name IS NOT NULL
  )
SELECT named.name, max(execution) AS execution FROM named JOIN nodes ON nodes.id = node
WHERE instr(lower(named.name), lower(?)) GROUP BY named.name ORDER BY named.name LIMIT ?
"""


def artifacts_like(history: History, text: str, *, limit: int) -> list[ArtifactRow]:
    """Returns artifacts whose id, stage, kind or path contains a text, latest first."""
    columns = ("id", "stage", "kind", "path")
    matches = " OR ".join(f"instr(lower({column}), lower(?))" for column in columns)
    rows = history.select(
        f"SELECT * FROM artifacts WHERE {matches} ORDER BY created_at DESC LIMIT ?",
        (*[text] * len(columns), limit),
    )
    return [read_artifact(row, history.store) for row in rows]


def latest_artifacts(history: History, *kinds: str, limit: int) -> list[ArtifactRow]:
    """Returns artifacts of some kinds, latest first."""
    marks = ", ".join("?" * len(kinds))
    rows = history.select(
        f"SELECT * FROM artifacts WHERE kind IN ({marks}) ORDER BY created_at DESC, id LIMIT ?",
        (*kinds, limit),
    )
    return [read_artifact(row, history.store) for row in rows]


def metrics_like(history: History, text: str, *, limit: int) -> dict[str, str]:
    """Returns metrics of recent nodes whose name contains a text, with a run that has each."""
    rows = history.select(_METRICS, (_NODES_SEARCHED, text, limit))
    return {str(row["name"]): str(row["execution"]) for row in rows}


def latest_evaluation(history: History, one: ArtifactRow) -> ArtifactRow | None:
    """Returns the latest evaluation of a model, or of a parent with the same weights."""
    weights = one.manifest.get("weights_hash")
    parents = history.select("SELECT parent_id FROM artifact_parents WHERE child = ?", (one.id,))
    same = [one.id]
    for parent in {row["parent_id"] for row in parents}:
        if weights and history.has_artifact(parent):
            is_same = history.artifact(parent).manifest.get("weights_hash") == weights
            same += [parent] if is_same else []
    rows = history.select(
        "SELECT * FROM artifacts WHERE kind = 'evaluation' AND id IN (SELECT child FROM "
        f"artifact_parents WHERE parent_id IN ({', '.join('?' * len(same))})) "
        "ORDER BY created_at DESC, rowid DESC LIMIT 1",
        tuple(same),
    )
    return read_artifact(rows[0], history.store) if rows else None
