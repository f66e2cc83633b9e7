"""The pages of a run that was interrupted."""

import html
import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from nemo_rl_core.history.writer import HistoryWriter, NewExecution, NodeEnd
from nemo_rl_core.store.manifest import Cost
from nemo_rl_core.store.store import Store
from nemo_rl_core.ui.app import create_app

REASON = "stopped from outside (SIGTERM) at step 16 of 30 of train_sft, after 3 min 41 s"


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    store = Store(tmp_path)
    writer = HistoryWriter(store, "cut")
    writer.begin(NewExecution("w.w", "", [], {}, store.runs / "cut" / "run.log"))
    node = writer.begin_node("train_sft", task="tasks.train_sft.train_sft", kind="task")
    cost = Cost(wall_seconds=221.0, tokens=500).model_dump()
    writer.end_node(node, NodeEnd("stopped", error="stopped from outside at step 16", cost=cost))
    writer.end("stopped", f"{REASON}\n  continue with: make grpo")
    return TestClient(create_app(store), base_url="http://127.0.0.1")


def shown(client: TestClient, path: str) -> str:
    """The text of a page, in one line."""
    page = client.get(path)
    assert page.status_code == 200
    text = re.sub(r"<(style|script).*?</\1>|<[^>]+>", " ", page.text, flags=re.DOTALL)
    return " ".join(html.unescape(text).split())


def test_a_stopped_run_is_not_a_failed_one(client: TestClient) -> None:
    page = shown(client, "/executions/cut")
    assert f"The run was interrupted. {REASON} continue with: make grpo" in page
    assert "The run failed" not in page
    assert "3 min 41 s of work, 500 tokens" in page
    assert "This node was interrupted. stopped from outside at step 16" in shown(client, "/nodes/1")


def test_stopped_runs_are_listed_and_chosen(client: TestClient) -> None:
    assert "stopped" in shown(client, "/?state=stopped")
    assert "cut" in shown(client, "/?state=stopped")
    assert "No run matches." in shown(client, "/?state=aborted")
