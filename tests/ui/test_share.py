"""A run and a comparison as one HTML file each, opened in a browser without a server."""

import base64
import hashlib
import json
import re
from html import escape
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from playwright.sync_api import BrowserContext, Page, expect
from starlette.testclient import TestClient

from nemo_rl_core.store.store import Store
from nemo_rl_core.ui.app import create_app
from tasks.cli.records.share import share
from tests.ui.conftest import FIRST, HOSTILE, RERUN, RecordedStore, accessibility_faults

FILES = {"run": f"/executions/{FIRST}/share.html", "comparison": "/compare/share.html"}
RUNS = {"run": [FIRST, RERUN]}


@pytest.mark.parametrize("name", FILES)
def test_a_shared_file_has_everything_inside_and_no_links_to_the_store(
    client: TestClient, name: str
) -> None:
    answer = client.get(FILES[name], params=RUNS)
    assert answer.headers["content-disposition"].startswith('attachment; filename="')
    text = answer.text
    assert re.findall(r'\b(?:href|src)="([^"]*)"', text) == ["#content"]
    assert "reward" in text
    assert "<script>alert" not in text
    # The policy names exactly the scripts of the page, by their hashes.
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts]
    assert re.findall(r"'sha256-([^']+)'", text) == digests
    assert len(text) < 1_000_000


def test_a_shared_run_has_facts_curves_and_completions(client: TestClient) -> None:
    text = client.get(FILES["run"]).text
    assert "60 % right" in text
    assert ">grpo_iteration</h2>" in text
    (data,) = re.findall(r'id="charts-data">(.*?)</script>', text)
    stage = json.loads(data)["stages"][-1]
    (reward,) = [one for one in stage["charts"] if one["name"] == "reward"]
    assert reward["lines"][0]["y"] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.2, 0.4, 0.6, 0.8])
    assert "unscored" in text
    assert HOSTILE not in text


@pytest.mark.parametrize("name", FILES)
def test_a_shared_file_names_neither_the_home_folder_nor_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    home = tmp_path / "alice&co"
    monkeypatch.setenv("HOME", str(home))
    made = RecordedStore(Store(tmp_path / "disk" / "store"))
    for run in (FIRST, RERUN):
        paths = [str(home / run), f"{home}2/{run}", f"s3://b{home}/{run}"]
        made.begin(run, paths=paths).end("failed", f'File "{made.store.root}/x.py"')
    client = TestClient(create_app(made.store), base_url="http://127.0.0.1")
    text = client.get(FILES[name], params=RUNS).text
    assert str(made.store.root) not in text
    assert f"~/{FIRST}" in text
    assert escape(f"2/{FIRST}") in text
    assert len(re.findall(re.escape(escape(f"{home}/")), text)) == text.count("s3://b")


def test_too_many_runs_are_refused_as_one_file(client: TestClient) -> None:
    answer = client.get("/compare/share.html", params={"run": []})
    assert answer.status_code == 400
    assert "1 to 24 runs" in answer.text


@pytest.mark.parametrize("runs", [[FIRST], [FIRST, RERUN]])
def test_the_command_writes_what_the_page_offers(
    client: TestClient, made: RecordedStore, tmp_path: Path, monkeypatch, runs: list[str]
) -> None:
    monkeypatch.setenv("NEMO_RL_HOME", str(made.store.root))
    done = CliRunner().invoke(share, [*runs, "--output", str(tmp_path / "a.html")])
    assert re.fullmatch(rf"wrote {tmp_path}/a\.html: 0\.\d MiB\n", done.output)
    monkeypatch.chdir(tmp_path)
    CliRunner().invoke(share, [*runs])
    name = FIRST if len(runs) == 1 else "comparison"
    assert (tmp_path / f"{name}.html").read_text().rstrip().endswith("</html>")
    offered = client.get(FILES["run" if len(runs) == 1 else "comparison"], params={"run": runs})

    def timeless(text: str) -> str:  # without the time of writing and "3 min ago"
        return re.sub(r"[\d-]{10} [\d:]{5,8}|\d+ \w+ ago|[\d.]+ (?:ms|s|min|h)\b", "", text)

    written = (tmp_path / "a.html").read_text()
    assert timeless(written) == timeless(offered.text)


def test_a_file_that_cannot_be_written_is_named(
    made: RecordedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMO_RL_HOME", str(made.store.root))
    done = CliRunner().invoke(share, [FIRST, "--output", str(tmp_path / "none" / "a.html")])
    assert isinstance(done.exception, SystemExit)
    assert "No such file or directory" in done.output


def opened(context: BrowserContext, path: Path) -> tuple[Page, list[str]]:
    """Opens a file, and collects its messages and the addresses that it requests."""
    page, seen = context.new_page(), list[str]()
    page.on("console", lambda message: seen.append(message.text))
    page.on("pageerror", lambda error: seen.append(str(error)))
    page.on("request", lambda request: seen.append(request.url))
    page.goto(path.as_uri())
    assert seen == [path.as_uri()]
    return page, seen


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_shared_file_opens_without_a_server(
    context: BrowserContext, client: TestClient, tmp_path: Path, name: str, scheme: str
) -> None:
    path = tmp_path / "shared.html"
    path.write_bytes(client.get(FILES[name], params=RUNS).content)
    page, seen = opened(context, path)
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    if name == "run":
        plot = page.locator(".plot").first
        plot.focus()
        page.keyboard.press("ArrowLeft")
        expect(plot.locator("xpath=../ul")).to_contain_text("step 8")
        page.keyboard.press("+")
        expect(page.get_by_role("button", name="Full range")).to_be_visible()
        with page.expect_download() as download:
            page.get_by_role("button", name="PNG").first.click()
        assert download.value.suggested_filename.endswith(".png")
    page.wait_for_timeout(300)
    assert accessibility_faults(page) == []
    page.set_viewport_size({"width": 400, "height": 800})
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert [one for one in seen if not one.startswith("blob:")] == [path.as_uri()]


@pytest.mark.slow
def test_a_conversation_in_parts_is_accessible(
    context: BrowserContext, made: RecordedStore, serve, tmp_path: Path
) -> None:
    """Turns, reasoning, calls, results and parts in both themes, with all parts opened."""
    call = {"function": {"name": "add", "arguments": {"a": 2, "text": HOSTILE}}}
    begin = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": HOSTILE, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "name": "add", "tool_call_id": "call_1", "content": "4"},
    ]
    rows = [
        {
            "prompt_id": "p",
            "group": 0,
            "sample": 0,
            "part": part,
            "prompt": "2+2?",
            "completion": "4",
            "reward": 1.0,
            "turn_rewards": [0.5, 0.5],
            "messages": json.dumps([*begin, {"role": "assistant", "content": str(part)}]),
        }
        for part in range(2)
    ]
    artifact = made.artifacts["grpo_iteration 1"]
    path = made.store.artifacts / artifact / "rollouts" / "step_000009.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    try:
        with serve(Store(made.store.root)) as address:
            for scheme in ("light", "dark"):
                page = context.new_page()
                page.emulate_media(color_scheme=scheme)
                page.goto(f"{address}/artifacts/{artifact}/completions?step=9")
                page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
                expect(page.get_by_role("group", name="Call of add").first).to_contain_text("a2")
                expect(page.get_by_text("2 turns as in part 1")).to_be_visible()
                assert accessibility_faults(page) == []
                page.set_viewport_size({"width": 400, "height": 800})
                assert page.evaluate("document.documentElement.scrollWidth") <= 400
    finally:
        path.unlink()
