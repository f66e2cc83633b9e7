"""Events conform to the public specification (version 2-0-2)."""

import json
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from uuid import UUID

import jsonschema
import pytest

from nemo_rl_core.errors import ConfigError
from nemo_rl_core.history.inserts import as_value
from nemo_rl_core.history.openlineage import Event, events_of, send
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.writer import HistoryWriter, NodeEnd
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.store import Store

TEXT = {"type": "string", "minLength": 1}
UUID_TEXT = {"type": "string", "pattern": "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"}
URI = {"type": "string", "pattern": "^(https://[a-z]+|urn:[a-z-]+:).+"}


def facets(**required: list[str]) -> dict[str, Any]:
    """Schema of facets: each has producer and schema; these have the required fields, too."""
    base = {"properties": {"_producer": URI, "_schemaURL": URI}}
    return {
        "type": "object",
        "additionalProperties": {**base, "required": ["_producer", "_schemaURL"]},
        "properties": {
            name: {**base, "required": ["_producer", "_schemaURL", *fields]}
            for name, fields in required.items()
        },
    }


DATASET = {
    "type": "object",
    "required": ["namespace", "name"],
    "properties": {
        "namespace": TEXT,
        "name": TEXT,
        "facets": facets(version=["datasetVersion"], datasetType=["datasetType"]),
        "inputFacets": facets(),
        "outputFacets": facets(),
    },
    "additionalProperties": False,
}
RUN_EVENT = {
    "type": "object",
    "required": ["eventTime", "producer", "schemaURL", "run", "job"],
    "properties": {
        "eventType": {"enum": ["START", "RUNNING", "COMPLETE", "ABORT", "FAIL", "OTHER"]},
        "eventTime": {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$"},
        "producer": URI,
        "schemaURL": {
            "const": "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent"
        },
        "run": {
            "required": ["runId"],
            "properties": {"runId": UUID_TEXT, "facets": facets(processing_engine=["version"])},
            "additionalProperties": False,
        },
        "job": {
            "required": ["namespace", "name"],
            "properties": {
                "namespace": TEXT,
                "name": TEXT,
                "facets": facets(jobType=["processingType", "integration"]),
            },
            "additionalProperties": False,
        },
        "inputs": {"type": "array", "items": DATASET},
        "outputs": {"type": "array", "items": DATASET},
    },
    "additionalProperties": False,
}


@pytest.fixture
def events(
    store: Store,
    begin: Callable[..., HistoryWriter],
    make_artifact: Callable[..., tuple[Path, Manifest]],
) -> list[Event]:
    data = make_artifact("prepare_data train", "aa")
    manifest = data[1].model_copy(update={"packages": {"nemo-rl-flow": "0.1.0"}})
    manifest.write(data[0])
    data = data[0], manifest
    trained = make_artifact("train_sft", "bb", data)
    writer = begin("run1")
    inputs = [as_value("train", "Dataset", {}, data[0].name)]
    node = writer.begin_node("train_sft", task="t.train_sft", kind="task", inputs=inputs)
    writer.end_node(node, NodeEnd("succeeded", made=[trained]))
    writer.end("succeeded")
    with History(store) as history:
        return events_of(history.ancestry(trained[0].name))


def test_events_conform_to_the_standard(events: list[Event]) -> None:
    for event in events:
        jsonschema.validate(event, RUN_EVENT)
        assert UUID(event["run"]["runId"])
    kinds = [(event["eventType"], event["job"]["name"]) for event in events]
    assert sorted(kinds) == [
        ("COMPLETE", "prepare_data"),
        ("COMPLETE", "train_sft"),
        ("START", "prepare_data"),
        ("START", "train_sft"),
    ]
    start = next(e for e in events if (e["eventType"], e["job"]["name"]) == ("START", "train_sft"))
    end = next(e for e in events if (e["eventType"], e["job"]["name"]) == ("COMPLETE", "train_sft"))
    assert start["run"]["runId"] == end["run"]["runId"]
    took = datetime.fromisoformat(end["eventTime"]) - datetime.fromisoformat(start["eventTime"])
    assert took.total_seconds() == 2.0
    assert start["outputs"] == []
    (read,), (made,) = end["inputs"], end["outputs"]
    assert read["name"].startswith("prepare_data-")
    assert read["inputFacets"]["nemo_rl_role"]["role"] == "train"
    assert made["facets"]["version"]["datasetVersion"] == "bb" * 32
    assert end["run"]["facets"]["nemo_rl_making"]["execution"] == "run1"


def test_facets_name_the_schemas_that_the_client_of_the_standard_writes(
    events: list[Event],
) -> None:
    """Compares with openlineage-python 1.54.0; custom facets have a prefix."""
    named: dict[str, str] = {}
    for event in events:
        holders = [event["run"], event["job"], *event["inputs"], *event["outputs"]]
        for holder in holders:
            for name, facet in {**holder["facets"], **holder.get("inputFacets", {})}.items():
                named[name] = facet["_schemaURL"]
    custom = {name for name in named if name.startswith("nemo_rl_")}
    assert custom == {"nemo_rl_making", "nemo_rl_role"}
    spec = "https://openlineage.io/spec/facets"
    assert {name: url for name, url in named.items() if name not in custom} == {
        name: f"{spec}/{version}/{schema}.json#/$defs/{schema}"
        for name, version, schema in [
            ("datasetType", "1-0-1", "DatasetTypeDatasetFacet"),
            ("jobType", "2-0-4", "JobTypeJobFacet"),
            ("processing_engine", "1-1-1", "ProcessingEngineRunFacet"),
            ("version", "1-0-1", "DatasetVersionDatasetFacet"),
        ]
    }


def test_an_artifact_read_twice_is_one_input(
    store: Store, begin: Callable[..., HistoryWriter], make_artifact: Callable[..., Any]
) -> None:
    start = make_artifact("train_sft", "aa")
    trained = make_artifact("grpo_iteration 1", "bb", start, start)
    writer = begin("run1")
    names = ("reference", "checkpoint")
    inputs = [as_value(name, "Checkpoint", {}, start[0].name) for name in names]
    node = writer.begin_node("grpo_iteration", task="t.grpo_iteration", kind="task", inputs=inputs)
    writer.end_node(node, NodeEnd("succeeded", made=[trained]))
    writer.end("succeeded")
    with History(store) as history:
        *_, end = events_of(history.ancestry(trained[0].name))
    (read,) = end["inputs"]
    assert read["inputFacets"]["nemo_rl_role"]["role"] == "checkpoint, reference"


def test_the_schema_refuses_invalid_events(events: list[Event]) -> None:
    for wrong in ({"eventType": "DONE"}, {"eventTime": "yesterday"}, {"run": {}}, {"more": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**events[0], **wrong}, RUN_EVENT)


@pytest.fixture
def endpoint() -> Iterator[tuple[str, list[Any]]]:
    """An address on this machine that accepts events, except /refuse, and the received events."""
    taken: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/api/v1/lineage":
                taken.append((self.headers["Content-Type"], json.loads(body)))
            self.send_response(201 if self.path == "/api/v1/lineage" else 422)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", taken
    server.shutdown()
    thread.join()
    server.server_close()


def test_events_go_to_a_file_or_an_endpoint(
    events: list[Event], endpoint: tuple[str, list[Any]], tmp_path: Path
) -> None:
    send(events, str(tmp_path / "events.jsonl"))
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == events
    address, taken = endpoint
    send(events, f"{address}/api/v1/lineage")
    assert taken == [("application/json", event) for event in events]
    with pytest.raises(ConfigError, match="422"):
        send(events, f"{address}/refuse")
    with pytest.raises(ConfigError, match="rejected an event"):
        send(events, "http://127.0.0.1:9/api/v1/lineage")
