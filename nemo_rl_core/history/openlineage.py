"""Ancestry as OpenLineage events, for data catalogues.

Run ids are derived from artifact ids, so sending events twice adds nothing.
See https://openlineage.io/spec/2-0-2/OpenLineage.json; the facets' versions are those of the client
openlineage-python 1.54. The commit is in a custom facet, since `sourceCodeLocation` requires a URL.
"""

import json
import urllib.error
import urllib.request
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from nemo_rl_core.config.url_secrets import redacted
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.history.records import AncestryGraph, ArtifactRow, GraphArtifact

_URN = "urn:nemo-rl-flow"
PRODUCER = f"{_URN}:lineage"
_SPEC = "https://openlineage.io/spec"
_EVENT_SCHEMA = f"{_SPEC}/2-0-2/OpenLineage.json#/$defs/RunEvent"
_RUNS = uuid.uuid5(uuid.NAMESPACE_URL, _URN)
_TIMEOUT_SECONDS = 10.0

Event = dict[str, Any]


def events_of(graph: AncestryGraph, *, namespace: str = "nemo-rl-flow") -> list[Event]:
    """Returns START and COMPLETE events of every artifact, oldest first."""
    by_id = {each.id: each for each in graph.artifacts}
    events = []
    # Times have a resolution of one second; the sort is stable, so equal ones stay in order.
    for each in reversed(graph.artifacts):
        if each.artifact is not None:
            roles: dict[str, list[str]] = {}
            for link in graph.parentage:
                if link.child == each.id and link.parent in by_id:
                    roles.setdefault(link.parent, []).append(link.role)
            parents = [(by_id[name], ", ".join(sorted(read))) for name, read in roles.items()]
            events += _stage_events(each, each.artifact, parents, namespace)
    return sorted(events, key=lambda event: str(event["eventTime"]))


def _stage_events(
    output: GraphArtifact,
    artifact: ArtifactRow,
    parents: Sequence[tuple[GraphArtifact, str]],
    namespace: str,
) -> list[Event]:
    ended = datetime.fromisoformat(artifact.created_at).astimezone(UTC)
    seconds = float(artifact.manifest.get("cost", {}).get("wall_seconds", 0.0))
    run = {"runId": str(uuid.uuid5(_RUNS, output.id)), "facets": _run_facets(output, artifact)}
    job = {
        "namespace": namespace,
        "name": artifact.stage.partition(" ")[0],
        "facets": {"jobType": _JOB_TYPE},
    }
    inputs = [
        {
            **_dataset(parent, namespace),
            "inputFacets": {"nemo_rl_role": _custom_facet("role", role=role)},
        }
        for parent, role in parents
    ]
    shared = {"producer": PRODUCER, "schemaURL": _EVENT_SCHEMA, "run": run, "job": job}
    start = {"eventType": "START", "eventTime": _time(ended - timedelta(seconds=seconds))}
    complete = {"eventType": "COMPLETE", "eventTime": _time(ended)}
    return [
        {**start, **shared, "inputs": inputs, "outputs": []},
        {**complete, **shared, "inputs": inputs, "outputs": [_dataset(output, namespace)]},
    ]


def _time(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _facet(version: str, schema: str, /, **fields: object) -> dict[str, Any]:
    url = f"{_SPEC}/facets/{version}/{schema}.json#/$defs/{schema}"
    return {"_producer": PRODUCER, "_schemaURL": url, **fields}


def _custom_facet(name: str, /, **fields: object) -> dict[str, Any]:
    return {"_producer": PRODUCER, "_schemaURL": f"{_URN}:facet:{name}", **fields}


_JOB_TYPE = _facet(
    "2-0-4",
    "JobTypeJobFacet",
    processingType="BATCH",
    integration="NEMO_RL_FLOW",
    jobType="TASK",
)


def _run_facets(output: GraphArtifact, artifact: ArtifactRow) -> dict[str, Any]:
    manifest = artifact.manifest
    facets = {
        "nemo_rl_making": _custom_facet(
            "making",
            execution=output.execution,
            git_commit=manifest.get("git_commit"),
            git_dirty=manifest.get("git_dirty"),
            cost=manifest.get("cost", {}),
            machine=manifest.get("machine", {}),
            config=manifest.get("config", {}),
            config_hash=manifest.get("config_hash", ""),
            seed=manifest.get("seed"),
        )
    }
    version = manifest.get("packages", {}).get("nemo-rl-flow")
    if version:
        facets["processing_engine"] = _facet(
            "1-1-1", "ProcessingEngineRunFacet", name="nemo-rl-flow", version=version
        )
    return facets


def _dataset(node: GraphArtifact, namespace: str) -> dict[str, Any]:
    facets = {
        "version": _facet("1-0-1", "DatasetVersionDatasetFacet", datasetVersion=node.content_hash)
    }
    if node.artifact is not None:
        facets["datasetType"] = _facet(
            "1-0-1",
            "DatasetTypeDatasetFacet",
            datasetType="MODEL" if node.artifact.kind in ("checkpoint", "model") else "FILE",
            subType=node.artifact.kind.upper(),
        )
    return {"namespace": namespace, "name": node.id, "facets": facets}


def send(events: Sequence[Event], target: str) -> None:
    """Writes events as JSON lines to a file, or posts them one by one to an http(s) URL."""
    if not target.startswith(("http://", "https://")):
        lines = [json.dumps(event) + "\n" for event in events]
        Path(target).expanduser().write_text("".join(lines))
        return
    for event in events:
        request = urllib.request.Request(
            target,
            data=json.dumps(event).encode(),
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS):
                pass
        except (urllib.error.URLError, TimeoutError) as error:
            raise ConfigError(
                f"the OpenLineage endpoint {redacted(target)} rejected an event",
                expected="status 200 or 201 for a POST",
                got=str(error),
                fix="check the address (Marquez: http://HOST:5000/api/v1/lineage), or name a file",
            ) from error
