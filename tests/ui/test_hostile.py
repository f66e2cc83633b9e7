"""Hostile names, settings, numbers and files: each page shows them as text."""

import html
import math
import re
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from playwright.sync_api import BrowserContext
from starlette.testclient import TestClient

from nemo_rl_core.history.inserts import as_value
from nemo_rl_core.history.writer import HistoryWriter, NewExecution, NodeEnd
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.store import Store
from nemo_rl_core.ui.app import create_app

MARKUP = "<script>alert(1)</script><img src=x onerror=alert(2)>&amp;'\"{{ 7*7 }}<!--"
CONTROL = "\x1b[31mred\x00\x07\u202eevil\u2066\u2028 end%2F../?#"
HOSTILE = MARKUP + CONTROL
LONG = "M" * 1_000_000
RUN = "odd \"<i>&' run"
FIGURES = (math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324)


def _folder(store: Store) -> tuple[Path, Manifest]:
    folder = store.artifacts / f"weird-{RUN}"
    (folder / "rollouts").mkdir(parents=True)
    (folder / "deck.html").write_text("<script>alert(3)</script>")
    (folder / "<b>&\"'.txt").write_text(HOSTILE)
    rows = {
        "prompt": [HOSTILE, None],
        "completion": [HOSTILE + LONG, None],
        "answer": [LONG, None],
        "reward": [math.nan, math.inf],
        "advantage": [math.nan, None],
        "truncated": [None, True],
    }
    steps = folder / "rollouts"
    pq.write_table(pa.table(rows), steps / "step_000001.parquet")
    odd = {"prompt": [[1, 2]], "completion": [{"role": "x"}], "reward": ["high"]}
    pq.write_table(pa.table(odd), steps / "step_000002.parquet")
    pq.write_table(pa.table({"other": [1]}), steps / "step_000003.parquet")
    (steps / "step_000004.parquet").write_text("no table")
    manifest = Manifest(
        kind="checkpoint",
        format=HOSTILE,
        stage=HOSTILE,
        content_hash="ab" * 32,
        config={HOSTILE: HOSTILE, "long": LONG},
        git_commit=HOSTILE,
    )
    manifest.write(folder)
    return folder, manifest


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store(tmp_path_factory.mktemp("hostile"))
    log = store.runs / RUN / "run.log"
    log.parent.mkdir(parents=True)
    log.write_bytes(b"\xff\xfe\x00" + HOSTILE.encode() + b"\n" + b"L" * 1_000_000)
    writer = HistoryWriter(store, RUN)
    inputs = {HOSTILE: {"x": HOSTILE, "nan": math.nan, LONG[:100_000]: LONG}}
    writer.begin(
        NewExecution(
            workflow=f"w.{HOSTILE}{LONG[:2000]}",
            recipe=HOSTILE + LONG[:5000],
            command=[HOSTILE, LONG],
            inputs=inputs,
            log_path=log,
            git_commit=HOSTILE,
            packages={HOSTILE: HOSTILE},
        )
    )
    values = [as_value(HOSTILE, HOSTILE, {"v": HOSTILE, "long": LONG})]
    name = HOSTILE + LONG[:1000]
    node = writer.begin_node(name, task=HOSTILE, kind="task", inputs=values, log_from=0)
    other = writer.begin_node(f"{name} 2", task=HOSTILE, kind="task")
    writer.connect(node, HOSTILE, other, HOSTILE)
    for step, figure in enumerate(FIGURES):
        names = {HOSTILE: figure, "": 1.0, "no number": math.nan, LONG[:100_000]: 1.0}
        writer.log_metrics(node, step, names | {"global_step": figure, "machine/x": figure})
    folder, manifest = _folder(store)
    end = NodeEnd(
        "succeeded",
        outputs=[as_value(HOSTILE, HOSTILE, {"o": HOSTILE}, folder.name)],
        made=[(folder, manifest)],
        deck_path=str(folder / "deck.html"),
        summary=HOSTILE + LONG,
        cost={"tokens": math.inf, "wall_seconds": math.nan},
        log_to=10**12,
    )
    writer.end_node(node, end)
    writer.end_node(other, NodeEnd("failed", error="\ud800" + HOSTILE + LONG))
    writer.end("failed", "\ud800" + HOSTILE + LONG)
    return store


def _every_page(client: TestClient) -> dict[str, str]:
    """Returns the text by address of each page reachable from the list, except decks and files."""
    artifact = f"/artifacts/{quote(f'weird-{RUN}')}"
    todo = ["/", f"/compare?run={quote(RUN)}&run={quote(RUN)}"]
    todo += [f"{artifact}/completions?step={k}&order=best" for k in (1, 2, 3)]
    todo += [f"{artifact}/completions?step=2&low=0&only=wrong&text=a"]
    pages: dict[str, str] = {}
    while todo:
        address = todo.pop()
        if address in pages or address.startswith("/static/") or "/files/" in address:
            continue
        answer = client.get(address)
        assert answer.status_code == 200 or "completions" in address, address
        if not address.endswith("/deck"):
            pages[address] = answer.text
            links = re.findall(r'(?:href|src)="(/[^"#]*)"', answer.text)
            todo += [html.unescape(link) for link in links]
    return pages


def test_no_page_fails_or_interprets_hostile_content(store: Store) -> None:
    pages = _every_page(TestClient(create_app(store), base_url="http://localhost"))
    assert len(pages) > 12
    for address, page in pages.items():
        assert "<script>alert" not in page, address
        assert "<img src=x" not in page, address
        assert not re.search("[\x00-\x08\x0b-\x1f\u202e\u2028]", page), address
        assert len(page) < 500_000, address


def test_a_damaged_table_and_odd_questions_are_explained(store: Store) -> None:
    client = TestClient(create_app(store), base_url="http://localhost")
    answer = client.get(f"/artifacts/{quote(f'weird-{RUN}')}/completions?step=4")
    assert answer.status_code == 503
    assert "cannot be read" in answer.text
    for wanted in ("%00", "a" * 5000, "~nobody/x", "%ff"):
        assert client.get(f"/find?q={wanted}").status_code == 404


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_runs_nothing_and_keeps_to_the_screen(
    context: BrowserContext, serve, store: Store, width: int, tmp_path: Path
) -> None:
    page = context.new_page()
    page.set_viewport_size({"width": width, "height": 800})
    messages: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("dialog", lambda dialog: (messages.append("a dialog"), dialog.dismiss()))
    paths = _every_page(TestClient(create_app(store), base_url="http://localhost"))
    with serve(store) as address:
        for path, text in paths.items():
            shared = tmp_path / "shared.html"  # the browser would save the original
            shared.write_text(text)
            page.goto(shared.as_uri() if "share.html" in path else address + path)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, path
    blocked = "frame is sandboxed"  # the deck's script
    assert [text for text in messages if blocked not in text and "503" not in text] == []
