"""JSON for programs, and its page of reference."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

from nemo_rl_core.ui.app import create_app
from tasks.cli.records.runs import runs
from tests.ui.conftest import FAILED, FIRST, RERUN, RecordedStore

PAGE = (Path(__file__).parents[2] / "docs" / "json-api.md").read_text()


def test_the_page_of_reference_has_every_address_for_programs(made: RecordedStore) -> None:
    paths = {route.path for route in create_app(made.store).routes}
    for_programs = {path for path in paths if re.search(r"\.\w+$|/events$|/files/", path)}
    names = {"{execution}": "RUN", "{artifact}": "ID", "{path:path}": "PATH"}
    written = re.sub(
        "|".join(map(re.escape, names)), lambda m: names[m[0]], "\n".join(for_programs)
    )
    assert set(re.findall(r"^\| `(/[^`]+)` \|", PAGE, re.MULTILINE)) == set(written.splitlines())


@pytest.mark.parametrize("arguments", [["--limit", "50"], [FIRST]])
def test_the_page_answers_what_the_command_prints(
    client: TestClient, made: RecordedStore, arguments: list[str]
) -> None:
    printed = CliRunner().invoke(runs, ["--json", "--store", str(made.store.root), *arguments])
    address = f"/executions/{FIRST}.json" if FIRST in arguments else "/runs.json"
    assert client.get(address).json() == json.loads(printed.stdout)


def test_parameters_choose_runs(client: TestClient) -> None:
    def ids(query: str) -> list[str]:
        return [one["id"] for one in client.get(f"/runs.json?{query}").json()["items"]]

    assert ids("state=failed") == [FAILED]
    assert ids("where=grpo.num_iterations%3D3") == [RERUN]
    assert ids("state=succeeded&sort=grpo.num_iterations") == [FIRST, RERUN]
    assert ids("state=succeeded&sort=grpo.num_iterations&offset=1") == [RERUN]
    refused = client.get("/runs.json?where=nonsense")
    assert refused.status_code == 400
    assert "nonsense" in refused.json()["error"]
    refused = client.get("/runs.json?state=nope")
    assert refused.status_code == 400
    assert "'nope': use one of running, succeeded" in refused.json()["error"]
    assert client.get("/executions/none.json").status_code == 404
