"""Ancestors of an artifact as table rows, and the config changes between them."""

from dataclasses import dataclass
from typing import Any

from nemo_rl_core.history.differences import MISSING, Difference, differences
from nemo_rl_core.history.records import AncestryGraph, ArtifactRow, GraphArtifact

_MODELS = ("checkpoint", "model")


@dataclass(frozen=True)
class Parent:
    """An artifact that another was made from, and its role."""

    id: str
    stage: str
    role: str


@dataclass(frozen=True)
class Row:
    """An ancestor as a row of the table."""

    ancestor: GraphArtifact
    stage: str
    step: int | None
    commit: str | None
    dirty: bool | None
    parents: list[Parent]


@dataclass(frozen=True)
class Change:
    """Differences between the config of a model and the config of the model before it.

    Attributes:
        shared: Differences in fields that both stages read.
        single: Fields that only one of the stages reads.
    """

    stage: str
    before: str
    shared: list[Difference]
    single: list[Difference]
    commits: tuple[str, str] | None

    @property
    def differs(self) -> bool:
        """True if config or code differ."""
        return bool(self.shared or self.single or self.commits)


def rows(graph: AncestryGraph) -> list[Row]:
    """Returns one row per artifact of the graph, nearest first."""
    stages = {one.id: _stage(one) for one in graph.artifacts}
    parents: dict[str, list[Parent]] = {}
    for link in graph.parentage:
        stage = stages.get(link.parent, link.parent)
        parents.setdefault(link.child, []).append(Parent(link.parent, stage, link.role))
    return [
        Row(
            one,
            stages[one.id],
            one.artifact.step if one.artifact else None,
            _manifest(one).get("git_commit"),
            _manifest(one).get("git_dirty"),
            parents.get(one.id, []),
        )
        for one in graph.artifacts
    ]


def changes(graph: AncestryGraph) -> list[Change]:
    """Compares each model with one of its parents, preferably of the same stage."""
    by_id = {one.id: one.artifact for one in graph.artifacts if one.artifact is not None}
    result = []
    for child in by_id.values():
        if child.kind not in _MODELS:
            continue
        ids = [link.parent for link in graph.parentage if link.child == child.id]
        parents = [by_id[i] for i in dict.fromkeys(ids) if i in by_id and by_id[i].kind in _MODELS]
        if parents:
            same_stage = [
                one for one in parents if base_stage(one.stage) == base_stage(child.stage)
            ]
            result.append(_change(same_stage[0] if same_stage else parents[0], child))
    return result


def base_stage(stage: str) -> str:
    """Returns the name without its number or part: `grpo_iteration` for `grpo_iteration 2`."""
    return stage.partition(" ")[0]


def _change(before: ArtifactRow, after: ArtifactRow) -> Change:
    commits = before.manifest.get("git_commit"), after.manifest.get("git_commit")
    fields = differences(before.manifest.get("config", {}), after.manifest.get("config", {}))
    return Change(
        stage=after.stage,
        before=before.stage,
        shared=[one for one in fields if MISSING not in (one.before, one.after)],
        single=[one for one in fields if MISSING in (one.before, one.after)],
        commits=(commits[0], commits[1])
        if commits[0] and commits[1] and commits[0] != commits[1]
        else None,
    )


def _stage(one: GraphArtifact) -> str:
    return one.artifact.stage if one.artifact else one.id


def _manifest(one: GraphArtifact) -> dict[str, Any]:
    return one.artifact.manifest if one.artifact else {}
