"""`nemo-rl lineage`: from a checkpoint back to its data, code, config and parents."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import rich_click
from rich.text import Text
from rich.tree import Tree

from nemo_rl_core.history.ancestry import folder_ancestry, folder_around
from nemo_rl_core.history.database import path_of
from nemo_rl_core.history.differences import MISSING, differences
from nemo_rl_core.history.openlineage import events_of, send
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import AncestryGraph, GraphArtifact, Parentage
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.console import console_on
from tasks.cli.records.names import complete_artifacts, resolve_alias

_MAX_DIFFERENCES = 12
_EVALUATED = ("evaluation", "promotion")
_STATES = {"found": "", "missing": "  (not here)", "changed": "  (CHANGED ON DISK)"}


@rich_click.command()
@click.argument("checkpoint", shell_complete=complete_artifacts, callback=resolve_alias)
@click.option("--store", type=click.Path(path_type=Path), help="Instead of NEMO_RL_HOME.")
@click.option("--json", "as_json", is_flag=True, help="Print the graph as JSON.")
@click.option("--openlineage", metavar="FILE|URL", help="Write OpenLineage events to a file as "
              "JSON lines, or post them to an endpoint.")  # fmt: skip
@click.option("--configs", is_flag=True, help="Show all config differences.")
def lineage(
    checkpoint: str, store: Path | None, as_json: bool, openlineage: str | None, configs: bool
) -> None:
    """Shows the ancestry of CHECKPOINT: data, code, config and parents.

    CHECKPOINT is an artifact's id, a prefix of it or of its content hash, `alias:` and a name, or a
    path in its folder, such as an exported model. The folder of a downloaded artifact contains its
    ancestry.
    """
    graph = _graph(checkpoint, Store(store) if store else Store.default())
    if openlineage:
        events = events_of(graph)
        send(events, openlineage)
        click.echo(f"{len(events)} events: {openlineage}")
    elif as_json:
        click.echo(json.dumps(asdict(graph), indent=1))
    else:
        console = console_on(whole_lines=True)
        console.print(_tree(graph, limit=None if configs else _MAX_DIFFERENCES))


def _graph(checkpoint: str, store: Store) -> AncestryGraph:
    folder = folder_around(Path(checkpoint).expanduser())
    is_elsewhere = folder is not None and store.artifacts.resolve() not in folder.parents
    if folder and is_elsewhere and not path_of(store).is_file():
        return folder_ancestry(folder)
    with History(store) as history:
        artifact = history.find_artifact(checkpoint)
        if folder and is_elsewhere and not history.has_artifact(artifact.id):
            return folder_ancestry(folder)
        return history.ancestry(artifact.id)


def _tree(graph: AncestryGraph, *, limit: int | None) -> Tree:
    """Returns a tree of all artifacts, each with its details once and then by name only."""
    by_id = {each.id: each for each in graph.artifacts}
    shown: set[str] = set()

    def grow(branch: Tree, artifact: str, role: str) -> None:
        each = by_id[artifact]
        label = _headline(each, role)
        if artifact in shown:
            label.append("  (see above)", style="dim")
            branch.add(label)
            return
        shown.add(artifact)
        inner = branch.add(label)
        parents = _parents(graph, artifact, by_id)
        for line in _details(each):
            inner.add(line)
        for link in parents:
            for line in _changes(by_id[link.parent], each, link.role, limit):
                inner.add(line)
        for link in parents:
            grow(inner, link.parent, link.role)

    root = Tree(Text("lineage", style="bold"))
    grow(root, graph.root, "")
    return root


def _parents(
    graph: AncestryGraph, artifact: str, known: dict[str, GraphArtifact]
) -> list[Parentage]:
    """Returns one line per parent with all of its roles; evaluation inputs come last."""
    roles: dict[str, list[str]] = {}
    for link in graph.parentage:
        if link.child == artifact:
            roles.setdefault(link.parent, []).append(link.role)
    links = [Parentage(name, artifact, ", ".join(sorted(role))) for name, role in roles.items()]
    return sorted(links, key=lambda link: (_kind(known[link.parent]) in _EVALUATED, link.role))


def _kind(each: GraphArtifact) -> str:
    return each.artifact.kind if each.artifact else ""


def _headline(each: GraphArtifact, role: str) -> Text:
    text = Text()
    if role:
        text.append(f"{role}: ", style="dim")
    stage = each.artifact.stage if each.artifact else "unknown"
    text.append(stage, style="bold")
    text.append(f"  {each.id}  content {each.content_hash[:16]}")
    text.append(_STATES[each.state], style="red")
    return text


def _details(each: GraphArtifact) -> list[Text]:
    if each.artifact is None:
        return [Text("not recorded", style="red")]
    manifest = each.artifact.manifest
    commit = (manifest["git_commit"] or "unknown")[:10]
    changes = " with uncommitted changes" if manifest["git_dirty"] else ""
    lines = [
        f"run {each.execution or 'not recorded'}, {each.artifact.created_at}",
        f"code {commit}{changes}, source {manifest['source_digest']}",
        f"config {manifest['config_hash'][:12]}, seed {manifest['seed']}, step {manifest['step']}",
        _cost(manifest),
    ]
    return [Text(line, style="dim") for line in lines]


def _cost(manifest: dict[str, Any]) -> str:
    cost, machine = manifest["cost"], manifest["machine"]
    words = [f"{cost['wall_seconds']:,.1f} s", f"{cost['tokens']:,} tokens"]
    words.append(f"{cost['peak_memory_gib']:.2f} GiB")
    return f"cost {', '.join(words)} on {machine['cpu_model']}, {machine['cores']} cores"


def _changes(
    parent: GraphArtifact, child: GraphArtifact, role: str, limit: int | None
) -> list[Text]:
    if parent.artifact is None or child.artifact is None or role == "reference":
        return []
    if (parent.artifact.kind, child.artifact.kind) != ("checkpoint", "checkpoint"):
        return []
    changes = differences(parent.artifact.manifest["config"], child.artifact.manifest["config"])
    shared_changes = [each for each in changes if MISSING not in (each.before, each.after)]
    unshared = len(changes) - len(shared_changes)
    line_start = f"config against {parent.artifact.stage}"
    lines = [
        f"{line_start}: {one.field}: {one.before} → {one.after}" for one in shared_changes[:limit]
    ]
    if limit is not None and len(shared_changes) > limit:
        lines.append(f"{line_start}: {len(shared_changes) - limit} more (--configs)")
    if unshared:
        lines.append(f"{line_start}: {unshared} settings that only one of the two stages has")
    return [Text(line, style="yellow") for line in lines or [f"{line_start}: the same"]]
